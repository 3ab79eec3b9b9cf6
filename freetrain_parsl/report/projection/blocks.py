"""The blocks of a run, folded from the records of its journal, once for all views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BlockFold", "BlockHistory"]


@dataclass
class BlockHistory:
    """The history of a block; times in seconds since the epoch.

    Parameters
    ----------
    nodes
        Their number.
    walltime
        Requested seconds.
    requested, started, ended
        When; ``None``: not yet.
    closes
        When it ends at the latest.
    job
        Its job in the batch system.
    released
        Whether we have given it back.
    reason
        Why it was released, or has ended.
    """

    name: str
    nodes: int
    walltime: float
    requested: float
    closes: float
    job: str = ""
    started: float | None = None
    ended: float | None = None
    released: bool = False
    reason: str = ""


class BlockFold:
    """Follows the blocks of one driver after the other; those that have ended are counted, and forgotten."""

    def __init__(self) -> None:
        self.requested = 0
        """Number of blocks that were requested."""
        self.endings: list[str] = []
        """Why blocks have ended."""
        self._open: dict[str, BlockHistory] = {}
        self.nodes: dict[str, str] = {}
        """Node that has joined -> its block."""

    def take(self, time: float, entry: record.Record) -> BlockHistory | None:
        """Take a record, and return the block that it concerns; ``None``: none of this driver's."""
        name = entry.subject
        block = self._open.get(name)
        match entry:
            case record.BlockRequested():
                self.requested += 1
                block = BlockHistory(name, len(entry.nodes) or 1, entry.seconds, time, time + entry.seconds)
                self._open[name] = block
            case record.BlockEnded():
                self.endings.append(entry.reason)
                self.nodes = {node: held for node, held in self.nodes.items() if held != name}
                if block is not None:
                    del self._open[name]
                    block.ended, block.reason = time, entry.reason
            case record.BlockSubmitted() if block is not None:
                block.job = entry.job
            case record.BlockStarted() if block is not None:
                block.nodes = len(entry.nodes)
                block.started = time if entry.since is None else min(time, max(entry.since, block.requested))
                block.closes = block.closes if entry.ends is None else entry.ends
            case record.BlockYields() if block is not None:
                block.closes = entry.closes
            case record.BlockReleased() if block is not None:
                block.released, block.reason = True, f"released: {entry.reason}"
            case _:
                return None
        return block

    @property
    def coming(self) -> str:
        """Describe the blocks whose nodes have not joined yet, while there is no other node; else it is empty."""
        blocks = [block for block in self._open.values() if not block.released]
        if self.nodes or not blocks:
            return ""
        number = sum(block.nodes for block in blocks)
        nodes = "its node" if number == 1 else f"its {number} nodes"
        jobs = [block.job for block in blocks if block.job]
        if not jobs:
            return f"waits for {nodes}: the job is being submitted"
        named = f"job {jobs[0]} is" if len(jobs) == 1 else f"jobs {', '.join(jobs)} are"
        return f"waits for {nodes}: {named} in the queue, or starting"

    @property
    def pending(self) -> int:
        """Number of blocks that wait in the queue."""
        return sum(block.started is None and not block.released for block in self._open.values())

    def held(self, now: float) -> list[tuple[int, float]]:
        """Return the nodes of the blocks that we have and keep, and for how many seconds each lasts after `now`."""
        kept = (block for block in self._open.values() if not block.released and block.closes > now)
        return [(block.nodes, block.closes - now) for block in kept]

    def end_driver(self, time: float, reason: str) -> Iterator[BlockHistory]:
        """End the blocks that are left, with their driver."""
        left, self._open, self.nodes = self._open, {}, {}
        for block in left.values():
            block.ended, block.reason = time, reason
            self.endings.append(reason)
            yield block
