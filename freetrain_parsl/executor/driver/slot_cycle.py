"""The life of a slot, from its request to its loss.

A slot that cannot start says something about its node, not about the run: HTEX gives the next task to the worker that
has just become free, so that one node without file descriptors fails any number of starts within milliseconds. These
are one problem of that node. Only problems of several nodes, or of all there are, over a stretch of time end the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsl.executors.high_throughput.errors import ManagerLost

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.driver.slot_registry import Slot
from freetrain_parsl.executor.environment import EnvironmentCheck
from freetrain_parsl.places import node_of
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.blocks import format_span
from freetrain_parsl.planning.model import PoolNode
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import Exit, Welcome
from freetrain_parsl.texts import printable, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.batch.submitter import JobSubmitter
    from freetrain_parsl.executor.driver.slot_registry import Block, SlotRegistry
    from freetrain_parsl.executor.driver.slot_server import SlotServer
    from freetrain_parsl.protocol.messages import Closing, Hello, SlotHeartbeat

logger = logging.getLogger(__name__)

__all__ = ["NodeStarts", "SlotCycle", "SlotTaskEnded"]

_FIRST_PAUSE = 10.0  # seconds
_LONGEST_PAUSE = 1800.0  # seconds
_SEVERAL = 3  # nodes; their common cause is not on one of them
_MOST_PROBLEMS = 4  # on a single node: the fourth comes after pauses of 10, 20 and 40 s
_STRETCH = 60.0  # seconds; a file system or a network may be away for less


class NodeStarts:
    """The problems that nodes have in starting slots. Times in seconds, from the same clock."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        """Node -> its problems since it last joined the pool."""
        self._until: dict[str, float] = {}
        self._nodes: set[str] = set()
        """The nodes with problems since any node joined the pool, whose number is `_problems`."""
        self._problems = 0
        self._since = 0.0
        self._last = ("", "")

    def failed(self, node: str, error: str, now: float) -> float | None:
        """Count a failed start on a node.

        Return the seconds for which no slot should be started there, longer each time; ``None``: this is part of a
        problem that is known, the node's pause is not over.
        """
        if now < self._until.get(node, now):
            return None
        times = self._in_a_row[node] = self._in_a_row.get(node, 0) + 1
        pause = min(_FIRST_PAUSE * 2.0 ** min(times - 1, 10), _LONGEST_PAUSE)
        self._until[node] = now + pause
        if not self._problems:
            self._since = now
        self._problems += 1
        self._nodes.add(node)
        self._last = node, error
        return pause

    def joined(self, node: str) -> None:
        """Record that all slots of a node have started: slots can start here."""
        self._in_a_row.pop(node, None)
        self._until.pop(node, None)
        self._nodes.clear()
        self._problems = 0

    def hopeless(self, now: float, nodes_there_are: int | None) -> str | None:
        """Return why no slot will ever start, or ``None`` while one may.

        `nodes_there_are` is the number of nodes on which blocks can ever start; ``None`` if unknown.
        """
        stretch, needed = now - self._since, min(_SEVERAL, nodes_there_are or _SEVERAL)
        if self._problems < _MOST_PROBLEMS or stretch < _STRETCH or len(self._nodes) < needed:
            return None
        node, error = self._last
        return (
            f"no slot could start for {format_span(stretch)}, on {', '.join(sorted(self._nodes))}; the last error, "
            f"on {node}: {error}; fix it there, or exclude these nodes in the site's scheduler options, and run again"
        )


@dataclass(frozen=True)
class SlotTaskEnded:
    """The HTEX task behind a slot has ended, which happens only if its process died or could not start."""

    token: str
    error: BaseException | None


class SlotCycle:
    """Requests slots, admits them, and drops those that fail. Owned by the control loop's thread.

    A slot is requested as a task of HTEX, identified by a token, and joins with its first message. Its node joins the
    pool with the last of its slots, and leaves it with the first; where jobs share nodes, a slot joins and leaves by
    itself.

    Parameters
    ----------
    on_lost
        Called with a slot that was dropped, the reason, and whether it crashed.
    aside
        Seconds for which a node is set aside the first time.
    others
        See `ControlLoop` and `BlockCycle`.
    """

    _LONGEST_REASON = 500  # characters
    _RETRY = 1.0  # seconds; HTEX may give the task that replaces a failed one to the same node at once
    _MOST_FAULTS = 5  # messages of a slot that cannot be handled
    _MOST_DENIALS = 15  # heartbeats; at least five are sent within the heartbeat timeout
    _NEARLY_SILENT = 0.7  # of the heartbeat timeout, which is at least five heartbeats
    _REPLACEMENT = 2.0  # seconds in which a worker place has another process after a crash, while its node is alive
    _PATIENCE = 60.0  # seconds until new slot tasks are submitted for a running block whose slots are missing

    def __init__(
        self,
        registry: SlotRegistry,
        server: SlotServer,
        submitter: JobSubmitter,
        *,
        submit_slot: Callable[[str], None],
        emit: Callable[[ev.Event], None],
        write: Callable[[record.Record], None],
        on_lost: Callable[[Slot, str, bool], None],
        fail_all: Callable[[Exception], None],
        heartbeat_timeout: float,
        aside: float,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._server = server
        self._submitter = submitter
        self._submit_slot = submit_slot
        self._emit = emit
        self._write = write
        self._on_lost = on_lost
        self._fail_all = fail_all
        self._heartbeat_timeout = heartbeat_timeout
        self._aside = aside
        self._clock = clock
        self._environments = EnvironmentCheck(write)
        self._tokens = 0
        self._greeted: set[str] = set()
        """Tokens of the slot tasks whose slots have connected."""
        self._known: set[str] = set()
        """Names of all slots that ever joined; a slot cannot join twice."""
        self._starts = NodeStarts()
        self._replaced: dict[str, tuple[float, str]] = {}
        """Unit, of the pool as far as the planner knows, one of whose slots is being replaced -> until when, reason."""
        self._units: Counter[str] = Counter()
        """Node -> number of its units in the pool, as far as the planner knows."""
        self._request_after: float | None = None
        self.nodes_there_are: int | None = None
        """Number of nodes on which blocks can ever start, as far as known."""

    # Requests for slots.

    def request_missing(self) -> None:
        """Request the slots that the blocks lack and that are not requested yet."""
        for _ in range(self._registry.missing_tasks()):
            self._request()

    def request_overdue(self) -> None:
        """Request once more the slots of running blocks that should have joined long ago."""
        for _ in range(self._registry.overdue(self._clock(), self._PATIENCE)):
            self._request()

    def request_again(self) -> None:
        """Request all missing slots anew: HTEX has lost the tasks that it had queued."""
        self._registry.tasks_queued = 0
        self.request_missing()

    def _request(self) -> None:
        self._tokens += 1
        self._registry.tasks_queued += 1
        self._submit_slot(f"slot-{self._tokens}")

    def on_task_ended(self, ended: SlotTaskEnded) -> BatchSystemError | None:
        """Handle the end of a slot's HTEX task; return an error once it is clear that no slot can start."""
        slot = self._registry.by_token(ended.token)
        if slot is not None:
            self._replace(slot, f"its process ended: {ended.error}")
        elif isinstance(ended.error, ManagerLost):
            return None  # its block has ended, which HTEX has only now noticed
        elif ended.token in self._greeted:
            # Dropped before its process ended. If its block is still running, the node can have another slot.
            self.request_missing()
            return None
        else:
            return self._could_not_start(ended.error)
        if self._registry.blocks:
            self._request()
        return None

    def _could_not_start(self, error: BaseException | None) -> BatchSystemError | None:
        now = self._clock()
        reason = "its process ended" if error is None else printable(text_of(error))[: self._LONGEST_REASON]
        self._registry.tasks_queued = max(0, self._registry.tasks_queued - 1)
        host = str(getattr(error, "hostname", "(unknown)"))  # of `SlotNotStarted`, or HTEX's `WorkerLost`
        node = next((name for block in self._registry.blocks.values() if (name := block.node_of(host)) != host), host)
        self._request_after = max(self._request_after or 0.0, now + self._RETRY)
        if (pause := self._starts.failed(node, reason, now)) is None:
            return None
        logger.warning(
            "a slot could not start on node %s: %s; the next one starts there in %.0f s", node, reason, pause
        )
        if self._registry.holds(node):
            self._registry.hold_back(node, now + pause, reason)
        else:
            self._request_after = now + pause  # it is not known whose slot is missing
        self._write(record.NodeSetAside(node, pause, f"a slot could not start there: {reason}"))
        hopeless = None if self._registry.has_complete_units else self._starts.hopeless(now, self.nodes_there_are)
        return None if hopeless is None else BatchSystemError(hopeless)

    # Joining.

    def on_hello(self, name: str, message: Hello) -> None:
        """Admit a slot that has connected, or end it."""
        if (known := self._registry.slots.get(name)) is not None:  # another process continues it
            self._write(record.SlotJoined(name, known.node, known.block, message.pid))
            return
        if name in self._known:
            self._server.send(name, Exit(now=True))  # it has been dropped
            return
        self._known.add(name)
        self._registry.tasks_queued = max(0, self._registry.tasks_queued - 1)
        self._greeted.add(message.token)
        block = self._registry.blocks.get(message.block)
        if block is None or block.releasing:
            # Its node may outlive the block: if the batch system's daemon there has failed, the job cannot be ended,
            # and its worker pool would take the slot tasks that are meant for other nodes.
            self._server.send(name, Exit(now=True, node=True))
            self.request_missing()
        elif refusal := self._environments.refusal(message):
            self._refuse(name, block, refusal)
        else:
            self._admit(name, message, block)

    def _refuse(self, name: str, block: Block, reason: str) -> None:
        """End a slot, and its block: its node cannot run training jobs."""
        self._server.send(name, Exit(now=True, node=True))
        block.releasing = reason
        self._submitter.reject(block.name, reason)
        if not self._environments.any_fits:  # further blocks would be wasted
            self._fail_all(BatchSystemError(reason))

    def _admit(self, name: str, message: Hello, block: Block) -> None:
        node = block.node_of(message.node)
        slot = Slot(
            name,
            message.token,
            node,
            block.name,
            heard=self._clock(),
            lane=self._registry.free_lane(node, _worker_of(name)),
            node_kind=block.node_kind,
        )
        self._registry.slots[name] = slot
        if block.joined is None:
            block.joined = self._clock()
        block.nodes = block.nodes or (node,)
        closes = block.loses_nodes_at(self._clock())
        self._server.send(name, Welcome(closes - self._clock()))
        self._write(record.SlotJoined(name, slot.node, block.name, message.pid))
        if self._registry.completes(slot):
            self._join_pool(slot, block)

    def _join_pool(self, slot: Slot, block: Block) -> None:
        """Add the unit of a slot, all of whose slots have joined, to the pool, unless the planner has not missed it."""
        self._starts.joined(slot.node)
        self._registry.start_errors.pop(slot.node, None)
        if self._replaced.pop(slot.place, None) is not None:
            return
        closes = block.loses_nodes_at(self._clock())
        host = "" if slot.lane is None else slot.node
        unit = PoolNode(slot.place, closes, host=host, node_kind=block.node_kind)
        self._emit(ev.NodesJoined(self._clock(), block.name, (unit,)))
        self._units[slot.node] += 1
        if self._units[slot.node] == 1:
            self._write(record.NodeJoined(slot.node, block.name, closes, block.node_kind))

    def set_aside(self, slot: Slot, reason: str) -> None:
        """Take a unit out of the pool for some time: it reaches the driver, but a training job cannot use it.

        Jobs on other slots of its node keep these: they can use them.
        """
        pause = self._registry.set_aside(slot.place, self._clock(), self._aside)
        what = "node" if slot.lane is None else "slot"
        logger.warning("%s %s is set aside for %.0f s: %s", what, slot.place, pause, reason)
        self._write(record.NodeSetAside(slot.place, pause, reason))
        self._leave_pool(slot, reason)

    def take_back(self) -> None:
        """Return units that were set aside to the pool when their time is over, and start the slots that they lack.

        Units whose slots were not replaced in time leave the pool.
        """
        for place, (until, reason) in list(self._replaced.items()):
            if self._clock() >= until or not self._registry.holds(node_of(place)):
                self._left_pool(place, reason)
        aside = self._registry.aside
        for slot in self._registry.returning(self._clock()):
            if (block := self._registry.blocks.get(slot.block)) is not None and self._registry.completes(slot):
                self._join_pool(slot, block)
        if self._registry.aside != aside:
            self._request_after = self._request_after or self._clock()
        if self._request_after is not None and self._clock() >= self._request_after:
            self._request_after = None
            self.request_missing()

    # Loss.

    def on_closing(self, slot: Slot, message: Closing) -> None:
        """Handle the batch system's signal that it reclaims a slot's node: the first of its slots tells it for all."""
        if (block := self._registry.blocks.get(slot.block)) is not None:
            block.warned = True
        if not slot.leaving:
            self._registry.reclaim(slot.node)
            self._emit(ev.NodesClosing(self._clock(), (slot.node,), self._clock() + message.closes_in))
            self._write(record.NodeClosing(slot.node, message.closes_in))
        if message.gone:
            self.reclaimed(slot)

    def reclaimed(self, slot: Slot) -> None:
        """Drop a slot that has nothing left to do on a node that the batch system reclaims."""
        self.lose(slot, "the batch system reclaims its node", crash=False)

    def count_fault(self, name: str, reason: str) -> None:
        """Count a message that cannot be handled; drop a slot that sends many."""
        slot = self._registry.slots.get(name)
        if slot is None:
            logger.warning("dropped a message of the unknown peer %s: %s", name, reason)
            return
        slot.faults += 1
        if slot.faults == 1:  # else such a slot could fill the disk
            logger.warning("dropped a message of slot %s: %s", name, reason)
        if slot.faults >= self._MOST_FAULTS:
            self.kill(slot, f"{slot.faults} of its messages could not be handled, the last: {reason}")

    def check_assignment(self, slot: Slot, heartbeat: SlotHeartbeat, run: int | None) -> None:
        """Drop a slot whose heartbeats keep contradicting its assignment: the command or its result was lost.

        `run` is the number of the run that is assigned to it, if any.
        """
        is_task = isinstance(slot.busy, int)
        given = slot.busy if isinstance(slot.busy, int) else run
        does = heartbeat.task if is_task else heartbeat.run
        if given is None or does == given:
            slot.denials = 0
            return
        slot.denials += 1
        if slot.denials > self._MOST_DENIALS:
            self.kill(slot, f"it does not run what it was assigned ({'task' if is_task else 'run'} {given})")

    def kill_silent(self, listened: float) -> None:
        """Kill the slots that had sent nothing for too long when their messages were last received, at `listened`.

        This includes slots that have been silent nearly as long: the slots of a node, or the nodes behind a switch, are
        cut off together, but were last heard up to a heartbeat apart. Otherwise they would count as several failures.
        """
        timeout, slots = self._heartbeat_timeout, self._registry.slots.values()
        if any(listened - slot.heard > timeout for slot in slots):
            for slot in [slot for slot in slots if listened - slot.heard > timeout * self._NEARLY_SILENT]:
                self.kill(slot, f"no message from it for {listened - slot.heard:.0f} s")

    def kill(self, slot: Slot, reason: str) -> None:
        """End a slot's process, and drop it."""
        self._server.send(slot.name, Exit(now=True))
        self.lose(slot, reason, crash=True)

    def lose(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Drop a slot: its unit is incomplete, and its training job must continue without it.

        `crash` is ignored if its node or block was about to end anyway.
        """
        crash = self._drop(slot, reason, crash=crash)
        self._leave_pool(slot, reason)
        self._on_lost(slot, reason, crash)
        self._join_again(slot)

    def _replace(self, slot: Slot, reason: str) -> None:
        """Drop a slot whose process has crashed, as its node's worker pool reports: it soon starts another one there.

        Until then the planner keeps the unit. Otherwise it would stop a training job that needs all its nodes, and
        start it again a moment later, although the survivors have just continued.
        """
        crash = self._drop(slot, reason, crash=True)
        if not crash:
            self._leave_pool(slot, reason)
        elif self._registry.incomplete(slot):
            self._replaced[slot.place] = self._clock() + self._REPLACEMENT, reason
        self._on_lost(slot, reason, crash)
        self._join_again(slot)

    def _join_again(self, lost: Slot) -> None:
        """Add the unit of a dropped slot to the pool again if another one had joined in its place before."""
        if (slot := self._registry.completed_without(lost)) is not None:
            self._join_pool(slot, self._registry.blocks[slot.block])

    def _drop(self, slot: Slot, reason: str, *, crash: bool) -> bool:
        """Remove a slot; return whether it has crashed on a node that we keep."""
        self._registry.slots.pop(slot.name, None)
        self._server.forget(slot.name)
        crash = crash and not slot.leaving and slot.block in self._registry.blocks
        logger.log(logging.WARNING if crash else logging.INFO, "dropped slot %s: %s", slot.name, reason)
        self._write(record.SlotLost(slot.name, slot.node, reason, planned=not crash))
        return crash

    def _leave_pool(self, slot: Slot, reason: str) -> None:
        if self._registry.incomplete(slot) or slot.place in self._replaced:
            self._left_pool(slot.place, reason)

    def _left_pool(self, place: str, reason: str) -> None:
        self._replaced.pop(place, None)
        self._emit(ev.NodesLeft(self._clock(), (place,)))
        node = node_of(place)
        self._units[node] -= 1
        if not self._units[node]:
            del self._units[node]
            self._write(record.NodeLeft(node, reason))


def _worker_of(slot: str) -> int | None:
    """Return the worker place of a slot on its node, and so its accelerator, from its name: ``n0/2/…``."""
    number = slot.rpartition("/")[0].rpartition("/")[2]
    return int(number) if number.isdecimal() else None
