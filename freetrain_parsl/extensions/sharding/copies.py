"""Copies of a sharded state in host memory: each member keeps its own part and that of a member on another node.

A copy has two phases. At a boundary all members copy their parts, which blocks the training job for as long as that
takes; then a thread of each sends it to the neighbour and receives another member's, while the training job continues.
It is complete when all members have told so in the sum of a later boundary. Until then the previous one is kept: every
member has room for two. A checkpoint is written from a copy, too, so that a save is not a second one.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.sharding import state as sharded
from freetrain_parsl.extensions.sharding.neighbours import neighbours
from freetrain_parsl.extensions.sharding.parts import Label, StateParts, digest, pack
from freetrain_parsl.training.checkpoints.save_schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.node_memory import NodeMemory, Shelf

__all__ = ["Copies", "HostCopy"]

logger = logging.getLogger(__name__)

_COPIES = 4  # of a part, on each node: one's own and another member's, complete and on their way
_AUTO_SHARE = 0.5  # of the available memory, unless the user has chosen the number of steps
_PIECE = 4 << 20  # bytes: a collective that needs the same connection waits for one piece at most
_TAG = 0xC0  # apart from the transfer of states, which is on the main thread
_LONGEST_END = 10.0  # seconds for a thread whose connections were shut down


class HostCopy(NamedTuple):
    """A copy of this member's part in host memory.

    Parameters
    ----------
    parts
        Name -> this member's part of the tensor.
    wait
        Called in another thread: returns once the copy is complete.
    """

    parts: dict[str, torch.Tensor]
    wait: Callable[[], None]


class Copies:
    """The copies of one member.

    Parameters
    ----------
    memory
        Keeps them.
    options
        When they are due.
    members
        This member's view of the group.
    """

    def __init__(self, memory: NodeMemory, options: SessionOptions, members: GroupMember) -> None:
        self._memory, self._members = memory, members
        self._job, self._name, self._every = Label.of_job(options), options.name, options.snapshot_every
        self._schedule = Schedule(replace(options, checkpoint_interval=None))
        own_1, other_1, own_2, other_2 = memory.shelves
        self._pairs = [(own_1, other_1), (own_2, other_2)]
        kept = [max((_step_on(shelf) for shelf in pair), default=-1) for pair in self._pairs]
        self._newest = kept.index(max(kept))  # the pair that is kept while the next copy is made
        self._has_any = max(kept) >= 0
        self.next_step: int | None = None
        """Number of steps after which the next one is due, if the user has chosen it."""
        self._generation = -1  # of the group that `_targets` and the last copy belong to
        self._targets: list[int] | None = None
        self._transfer: _Transfer | None = None
        self._being_saved: int | None = None  # the pair of which a checkpoint is written
        self.transfer_seconds = self.blocked_seconds = 0.0
        """Seconds of the last transfer, and for which the last copy has blocked the training job."""

    def due(self, step: int, now: float) -> bool:
        """Return whether a copy is due, as far as this member knows: see `SessionExtension.copy_due`."""
        group = self._members.group
        if self._every and self.next_step is None:
            self.next_step = step + self._every
        due = self._schedule.due(now, self._schedule.interval(self.transfer_seconds))
        if group.size == 1:
            return False
        if group.generation != self._generation:
            if self._has_any:  # of another group: a part of it may be on this node only
                return True
        elif self._targets is None or self._transfer is not None or self._being_saved == 1 - self._newest:
            return False
        return step >= self.next_step if self._every and self.next_step is not None else due

    @property
    def arrived(self) -> bool:
        """Whether the current transfer has ended well."""
        transfer = self._transfer
        return transfer is not None and transfer.arrived and self._generation == self._members.group.generation

    def begin_for_save(self, state: Mapping[str, Any]) -> HostCopy | None:
        """Begin a copy of which a checkpoint is written; it stays until `saved`; all members call this.

        Returns
        -------
        copy
            ``None``: there are no copies in this group, or the one before is still on its way.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        group = self._members.group
        if group.size == 1 or (group.generation == self._generation and self._transfer is not None):
            return None
        copy = self.begin(state)
        self._being_saved = None if copy is None else 1 - self._newest
        return copy

    def saved(self) -> None:
        """Note that the checkpoint is written, or given up, on all members."""
        self._being_saved = None

    def begin(self, state: Mapping[str, Any]) -> HostCopy | None:
        """Copy this member's part of a state, and start to exchange it; all members call this.

        Returns
        -------
        copy
            ``None``: there are no copies in this group.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        group, begun = self._members.group, time.monotonic()
        self._schedule.saving()
        step = int(state["books"]["step"])
        if self._every:
            self.next_step = (step // self._every + 1) * self._every
        plain, shards = sharded.split(state)
        parts, problem = None, ""
        try:
            parts = StateParts.of(shards)
        except UsageError as error:
            problem = str(error)
        if group.generation != self._generation:
            if not self._has_ended():
                parts, problem = None, "a transfer in the last group does not end"
            self._targets = self._plan(group, parts, problem)
            self._generation, self._transfer = group.generation, None
        if self._targets is None or parts is None:
            return None
        own, other = self._pairs[1 - self._newest]
        other.empty()
        content = own.open(parts.size(group.rank, group.size))
        own.pin()
        copied: dict[str, torch.Tensor] = {}
        for view, names in zip(parts.views(content, group.rank, group.size), parts.names, strict=True):
            view.copy_(shards[names[0]].to_local().detach(), non_blocking=True)
            copied |= dict.fromkeys(names, view)
        label = Label(self._job, group.generation, group.size, step, group.rank, is_own=True)
        loop = {**plain["loop"], "own": []}
        mine: Any = plain["loop"]["own"][0]
        head = pack(label, {"plain": {**plain, "loop": loop}, "parts": parts.as_plain(), "own": mine})
        sent = pack(replace(label, is_own=False), {"own": mine})
        target, source = self._targets[group.rank], self._targets.index(group.rank)
        self._transfer = _Transfer(_once_copied(lambda: own.seal(head)), sent, content, other, target, source)
        self.blocked_seconds = time.monotonic() - begun
        self._schedule.measured(blocked=self.blocked_seconds)
        return HostCopy(copied, _once_copied(lambda: None))

    def complete(self) -> None:
        """Note that the copy has arrived at all members: the previous one may be overwritten."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None, "it has arrived"
        self._newest, self._has_any = 1 - self._newest, True
        self._schedule.measured(slowdown=transfer.processor_seconds / torch.get_num_threads())
        self.transfer_seconds = transfer.seconds

    def close(self) -> None:
        """Accept no further copy."""
        if self._transfer is not None:
            self._transfer.dropped = True

    def _has_ended(self) -> bool:
        if self._transfer is None:
            return True
        self._transfer.dropped = True
        self._transfer.thread.join(_LONGEST_END)
        return not self._transfer.thread.is_alive()

    def _plan(self, group: Group, parts: StateParts | None, problem: str) -> list[int] | None:
        """Choose the neighbours in a new group, all members together; ``None``: there are no copies in it."""
        memory = self._memory
        needed = 0 if parts is None else _COPIES * parts.size(0, group.size)
        mine = [digest(memory.node), digest(memory.block), max(0, needed - memory.held), memory.available]
        rows = [tensor.tolist() for tensor in group.gather(torch.tensor([*mine, int(parts is None)]))]
        nodes, blocks = [row[0] for row in rows], [row[1] for row in rows]
        share = 1.0 if self._every else _AUTO_SHARE
        room = {node: share * min(row[3] for row in rows if row[0] == node) for node in nodes}
        asked = {node: sum(row[2] for row in rows if row[0] == node) for node in nodes}
        targets = neighbours(nodes, blocks)
        if any(row[4] for row in rows):
            reason = problem or "another process cannot copy its part"
        elif targets is None:
            reason = "more than half of its processes are on one node"
        elif any(asked[node] > room[node] for node in nodes):
            node = max(nodes, key=lambda node: asked[node] - room[node])
            reason = f"a node would need {asked[node]:,} bytes of memory for them and has {room[node]:,.0f} to spare"
        else:
            return targets
        if group.is_first:
            logger.warning(
                "training job %s: no copies of its state in the memory of other nodes: %s; after a failure it resumes "
                "from its newest checkpoint", self._name, reason,
            )  # fmt: skip
        return None


def _once_copied(action: Callable[[], None]) -> Callable[[], None]:
    """Act at once if there is no GPU, else when the returned function is called: it waits for the copies before it."""
    if not torch.cuda.is_available():
        action()
        return lambda: None
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
    copied.record()

    def act() -> None:
        copied.synchronize()
        action()

    return act


def _step_on(shelf: Shelf) -> int:
    label = Label.on(shelf)
    return -1 if label is None else label.step


class _Transfer:
    """Sends this member's copy to its neighbour, and receives another member's, in a thread.

    Parameters
    ----------
    ready
        Called first, in the thread: waits until the copy is complete.
    head, content
        The copy.
    shelf
        Where the other member's goes.
    target, source
        Ranks.
    """

    def __init__(
        self, ready: Callable[[], None], head: bytes, content: torch.Tensor, shelf: Shelf, target: int, source: int
    ) -> None:
        self.arrived = self.dropped = False
        self.seconds = self.processor_seconds = 0.0
        self._ready = ready
        self._head = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._content, self._shelf = content, shelf
        self._target, self._source = target, source
        # Not looked up later: the thread may still run when this process is in another group.
        self._process_group: Any = dist.group.WORLD
        self.thread = threading.Thread(target=self._run, name="freetrain-copy", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        begun, used = time.monotonic(), time.thread_time()
        try:
            self._ready()
            sizes = torch.zeros(2, dtype=torch.int64)
            self._exchange(torch.tensor([self._head.numel(), self._content.numel()]), sizes)
            head = torch.empty(int(sizes[0]), dtype=torch.uint8)
            self._exchange(self._head, head)
            self._exchange(self._content, self._shelf.open(int(sizes[1])))
        except (RuntimeError, ValueError):  # of torch: a member has failed, which the main thread finds out, too
            return
        if not self.dropped:
            self._shelf.seal(head.numpy().tobytes())
            self.seconds, self.processor_seconds = time.monotonic() - begun, time.thread_time() - used
            self.arrived = True

    def _exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        """Send and receive, piece by piece; both are bytes, or of the same type."""
        size = _PIECE // out.element_size()
        for begin in range(0, max(out.numel(), into.numel()), size):
            pieces = (into[begin : begin + size], out[begin : begin + size])
            works = []
            if pieces[0].numel():
                works.append(self._process_group.recv([pieces[0]], self._source, _TAG))
            if pieces[1].numel():
                works.append(self._process_group.send([pieces[1]], self._target, _TAG))
            for work in works:
                work.wait()
            if self.dropped:
                raise RuntimeError("the copy is not needed any more")
