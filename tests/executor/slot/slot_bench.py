"""A slot cycle whose channel, batch system and clock are the test's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.driver.slot_cycle import SlotCycle, SlotTaskEnded
from freetrain_parsl.executor.driver.slot_registry import Block, SlotRegistry
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import Hello

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.errors import BatchSystemError
    from freetrain_parsl.planning import events as ev


class SlotBench:
    """A slot cycle with blocks "0", "1", … that have just started on these nodes."""

    def __init__(self, *blocks: tuple[str, ...], slots_per_node: int = 1, share_nodes: bool = False) -> None:
        self.now = 0.0
        self.requested: list[tuple[float, str]] = []
        """Time and token of each slot task."""
        self.records: list[record.Record] = []
        self.events: list[ev.Event] = []
        self.lost: list[tuple[str, bool]] = []
        """Slot, and whether it crashed."""
        self.failed_blocks: list[str] = []
        self.registry = SlotRegistry(slots_per_node, share_nodes=share_nodes)
        for number, nodes in enumerate(blocks):
            block = self.registry.blocks[str(number)] = Block(str(number), nodes, 3600.0, None)
            block.start(0.0, nodes, 3600.0)
        self.cycle = SlotCycle(
            self.registry,
            self,  # type: ignore[arg-type] - the test's channel
            self,  # type: ignore[arg-type] - the test's job submitter
            submit_slot=lambda token: self.requested.append((self.now, token)),
            emit=self.events.append,
            write=self.records.append,
            on_lost=lambda slot, _reason, crash: self.lost.append((slot.name, crash)),
            fail_all=lambda _error: None,
            heartbeat_timeout=10.0,
            aside=10.0,
            clock=lambda: self.now,
        )
        self.cycle.request_missing()

    def send(self, _slot: str, _message: object) -> None: ...
    def forget(self, _slot: str) -> None: ...

    def failed_to_start(self, _block: str, how: str) -> None:
        self.failed_blocks.append(how)

    def open_tasks(self) -> list[str]:
        """Take the slot tasks that were submitted since the last call."""
        tokens, self.requested[:] = [token for _, token in self.requested], []
        return tokens

    def let_pass(self, seconds: float) -> None:
        self.now += seconds
        self.cycle.take_back()

    def join(self, token: str, node: str, block: str = "0") -> None:
        self.cycle.on_hello(f"{node}/{token}", Hello(token, node, block, 0))

    def run(self, fate: Callable[[float, str], BaseException | str], seconds: float) -> BatchSystemError | None:
        """Let each task end, or its slot join the node that `fate` returns, for some time; return what ends the run."""
        until = self.now + seconds
        while self.now < until:
            for token in self.open_tasks():
                outcome = fate(self.now, token)
                if isinstance(outcome, str):
                    self.join(token, outcome)
                elif (error := self.cycle.on_task_ended(SlotTaskEnded(token, outcome))) is not None:
                    return error
            self.let_pass(0.25)
        return None

    def aside(self) -> list[tuple[str, float]]:
        return [(one.subject, one.seconds) for one in self.records if isinstance(one, record.NodeSetAside)]
