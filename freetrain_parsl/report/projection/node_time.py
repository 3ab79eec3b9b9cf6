"""What the node time that a run held was used for: folded from its journal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from freetrain_parsl.places import slots_of
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.windows.base import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["NodePhase", "NodeTime", "NodeTimeFold"]


_HOUR = 3600.0
_WITH_THE_DRIVER = "ended with the driver"
_ENDED_BY_ITSELF = (BlockState.COMPLETED.value, _WITH_THE_DRIVER)


class NodePhase(Enum):
    """What a node that we hold is doing; where jobs share nodes, each of its slots."""

    STARTING = "starting"
    """From the start of its block until its slots are ready."""
    TRAINING = "training"
    """In a fragment of at least one training job."""
    BETWEEN = "between"
    """Its slots are ready, and no training job runs."""
    LEAVING = "leaving"
    """It has left the pool, but its block has not ended."""


@dataclass
class NodeTime:
    """Node time of one driver's blocks, in node-seconds; a slot of a node that jobs share counts as its share of it.

    Parameters
    ----------
    phases
        Node-seconds held, by what the node was doing.
    returned
        Node-seconds of started blocks that were requested but given back: we released them before the end of their
        walltime, or they ended by themselves or with the driver.
    cut_short
        Node-seconds of started blocks that were requested but neither used nor given back: the blocks were preempted,
        cancelled or failed before the end of their walltime.
    requested, started
        Number of blocks.
    endings
        Number of started blocks by the reason for which they ended.
    yielded
        Number of blocks that released their nodes early because another user's job could start there.
    closing_notices
        Number of times that the batch system announced that it reclaims a node.
    lost_fragments
        Number of fragments that ended because a process or node failed.
    begin, end
        Times of the first and last entry, seconds since the epoch; ``None`` without entries.
    unfinished
        Number of blocks whose end is not recorded; they are counted until now or, if their driver was killed, until its
        last entry.
    slot_seconds
        Slot-seconds of nodes on which training jobs ran.
    useful_slot_seconds
        Slot-seconds in steps that count, of all drivers together; see `CountedSteps`.
    shared_slots
        Number of slots of a node, if jobs share nodes; 1: jobs have whole nodes.
    requests
        Hour, in seconds since the epoch -> how often each command of the batch system was run in it.
    """

    phases: dict[NodePhase, float] = field(default_factory=lambda: dict.fromkeys(NodePhase, 0.0))
    returned: float = 0.0
    cut_short: float = 0.0
    requested: int = 0
    started: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    yielded: int = 0
    closing_notices: int = 0
    lost_fragments: int = 0
    begin: float | None = None
    end: float | None = None
    unfinished: int = 0
    slot_seconds: float = 0.0
    useful_slot_seconds: float = 0.0
    shared_slots: int = 1
    requests: dict[float, Counter[str]] = field(default_factory=dict)

    @property
    def held(self) -> float:
        """All node-seconds held."""
        return sum(self.phases.values())

    @property
    def slots_per_node(self) -> float:
        """Mean number of slots of the nodes on which training jobs ran, which may be of several kinds."""
        training = self.phases[NodePhase.TRAINING]
        return self.slot_seconds / training if training else 1.0

    @property
    def useful(self) -> float:
        """Node-seconds in steps that count."""
        return self.useful_slot_seconds / self.slots_per_node

    def add(self, other: NodeTime) -> None:
        """Add the account of another driver of the same run."""
        for phase, seconds in other.phases.items():
            self.phases[phase] += seconds
        self.returned += other.returned
        self.cut_short += other.cut_short
        self.requested += other.requested
        self.started += other.started
        self.endings += other.endings
        self.yielded += other.yielded
        self.closing_notices += other.closing_notices
        self.lost_fragments += other.lost_fragments
        self.unfinished += other.unfinished
        for hour, counts in other.requests.items():
            self.requests[hour] = self.requests.get(hour, Counter()) + counts
        self.slot_seconds += other.slot_seconds
        self.shared_slots = max(self.shared_slots, other.shared_slots)
        self.begin = min((time for time in (self.begin, other.begin) if time is not None), default=None)
        self.end = max((time for time in (self.end, other.end) if time is not None), default=None)


@dataclass
class _Node:
    """A node that a block holds, or a slot of one that jobs share."""

    block: str
    begin: float
    """When it began to hold it, as far as known."""
    since: float
    """Time up to which it is accounted for."""
    phase: NodePhase = NodePhase.STARTING
    """Its phase while no training job runs on it."""
    entered: float = 0.0
    """When it came into this phase."""


class NodeTimeFold:
    """Adds up the node time of one driver, record by record; all times are those of its journal's clock.

    It follows units: whole nodes, or the slots of nodes that jobs share. The records of blocks name nodes.
    """

    def __init__(self) -> None:
        self.lead = 0.0
        """Seconds by which the wall clock leads the journal's clock, which is never set."""
        self._account = NodeTime()
        self._now = 0.0
        self._requests: dict[str, float] = {}  # block that has not ended -> requested walltime, seconds
        self._requested: dict[str, float] = {}  # such a block -> when
        self._released: set[str] = set()  # blocks that have not ended
        self._ends: dict[str, float] = {}  # started block -> end of its walltime
        self._nodes: dict[str, _Node] = {}
        self._freed: dict[str, float] = {}  # unit that we have held -> until when
        self._fragments: dict[tuple[str, int], list[str]] = {}  # (training, generation) -> units
        self._training: Counter[str] = Counter()  # unit -> fragments on it
        self._slots: dict[str, tuple[str, str]] = {}  # slot that is connected -> its block and node
        self._connected: Counter[tuple[str, str]] = Counter()  # (block, node) -> such slots
        self._most_slots: dict[tuple[str, str], int] = {}  # (block, node) -> slots that were connected at a time

    def take(self, time: float, entry: record.Record | None) -> None:
        """Take the next record; ``None``, one of another version, counts as time only."""
        account = self._account
        self._now = account.end = max(self._now, time)
        account.begin = time if account.begin is None else account.begin
        match entry:
            case record.PlannerStarted():
                account.shared_slots = entry.slots_per_node
            case record.PlannerStep(events=events) if account.shared_slots > 1:
                self._take_slots(events)
            case record.BlockRequested(subject=block):
                account.requested += 1
                self._requests[block] = entry.seconds
                self._requested[block] = time
            case record.BlockStarted(subject=block):
                self._start(block, entry.nodes, entry.ends, entry.since)
            case record.BlockEnded(subject=block):
                self._end(block, entry.reason, entry.held)
            case record.BlockReleased(subject=block):
                if entry.reason != BlockState.PREEMPTED.value:
                    self._released.add(block)
            case record.BatchRequests():
                hour = (time - entry.seconds) // _HOUR * _HOUR
                account.requests.setdefault(hour, Counter()).update(entry.counts)
            case record.BlockYields():
                account.yielded += 1
            case record.ClockStepped(lead=lead):
                self.lead = lead
            case record.NodeClosing():
                account.closing_notices += 1
            case _:
                self._take_node_record(entry)

    def _take_node_record(self, entry: record.Record | None) -> None:
        match entry:
            case record.SlotJoined(subject=slot) if slot not in self._slots:
                place = self._slots[slot] = (entry.block, entry.node)
                self._connected[place] += 1
                self._most_slots[place] = max(self._connected[place], self._most_slots.get(place, 0))
            case record.SlotLost(subject=slot) if slot in self._slots:  # another one may take its place
                self._connected[self._slots.pop(slot)] -= 1
            case record.NodeJoined(subject=node):
                if entry.block in self._requests:  # it may join before a query has shown that its block started
                    self._start(entry.block, [node], entry.closes)
                if self._units(node) == [node]:  # of a node that jobs share, one slot is ready: see `_take_slots`
                    self._enter(node, NodePhase.BETWEEN)
            case record.NodeLeft(subject=node):
                for name in self._units(node):
                    self._enter(name, NodePhase.LEAVING)
            case record.FragmentStarted(subject=training):
                self._fragment_ends(training, entry.generation)  # a report that came twice
                units = [name for place in entry.nodes for name in self._units(place)]
                self._count(units, 1)
                self._fragments[training, entry.generation] = units
            case record.FragmentEnded(subject=training):
                self._account.lost_fragments += entry.failure
                self._fragment_ends(training, entry.generation)

    def _take_slots(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take from the planner's events which slots of shared nodes are ready; records name only their nodes."""
        for event in events:
            if event["type"] == "nodes_joined":
                for node in event["nodes"]:
                    self._enter(node["name"], NodePhase.BETWEEN)
            elif event["type"] == "nodes_left":
                for name in event["nodes"]:
                    self._enter(name, NodePhase.LEAVING)

    def _units(self, place: str) -> list[str]:
        return slots_of(place, self._account.shared_slots)

    def pass_time(self, time: float) -> None:
        """Note that the driver runs at `time`."""
        self._now = max(self._now, time)
        if self._account.end is not None:
            self._account.end = self._now

    def so_far(self, time: float) -> NodeTime:
        """Return the account up to `time`, and change nothing: if the driver is killed, its last record counts."""
        account = NodeTime()
        account.add(self._account)
        account.unfinished += len(self._ends)
        account.end = None if account.end is None else max(account.end, time)
        for name in self._nodes:
            self._count_time(account, name, max(self._now, time))
        return account

    def finish(self, ended: float | None) -> NodeTime:
        """Return the account at the end of the driver; `ended`: when it ended by itself, ``None``: it was killed."""
        if ended is not None:
            self._now = max(self._now, ended)
        for block in list(self._ends):
            if ended is not None:
                self._end(block, _WITH_THE_DRIVER)
            else:
                self._account.unfinished += 1
                self._close(block)
        return self._account

    def _start(self, block: str, nodes: Iterable[str], ends: float | None, since: float | None = None) -> None:
        """Record that a block holds nodes, `since` when; those that it holds already keep their phase."""
        begin = self._now if since is None else max(since, self._requested.get(block, self._now))
        self._account.started += block not in self._ends
        self._ends[block] = self._now + self._requests.get(block, 0.0) if ends is None else ends
        for name in (name for node in nodes for name in self._units(node)):
            held = self._nodes.get(name)
            if held is not None and held.block == block:  # it joined before its block was seen to start
                start = min(held.begin, max(begin, self._freed.get(name, begin)))
                self._account.phases[NodePhase.STARTING] += (held.begin - start) / self._account.shared_slots
                held.begin = start
                continue
            if held is not None:
                self._leave(name)
            start = min(self._now, max(begin, self._freed.get(name, begin)))
            self._nodes[name] = _Node(block, start, start)

    def _end(self, block: str, reason: str, held: float | None = None) -> None:
        self._requests.pop(block, None)
        self._requested.pop(block, None)
        given_back = block in self._released or reason.startswith(_ENDED_BY_ITSELF)
        self._released.discard(block)
        if block not in self._ends:  # it never started
            return
        self._account.endings[reason] += 1
        until = self._held_until(block, held)
        nodes = sum(node.block == block for node in self._nodes.values()) / self._account.shared_slots
        left = nodes * max(0.0, self._ends[block] - until)
        if given_back:
            self._account.returned += left
        else:
            self._account.cut_short += left
        self._close(block, until)

    def _held_until(self, block: str, held: float | None) -> float:
        """Return until when a block held its nodes: a survey shows its end up to a poll interval late.

        If all its nodes have left, until the last one did, or until `held`, when a survey still showed it, if later.
        """
        nodes = {name: node for name, node in self._nodes.items() if node.block == block}
        gone = all(node.phase is NodePhase.LEAVING and not self._training[name] for name, node in nodes.items())
        last = max((node.entered for node in nodes.values()), default=0.0)
        return self._now if held is None or not gone else min(self._now, max(held, last))

    def _close(self, block: str, until: float | None = None) -> None:
        del self._ends[block]
        for name in [name for name, node in self._nodes.items() if node.block == block]:
            self._leave(name, until)

    def _leave(self, name: str, until: float | None = None) -> None:
        self._settle(name, until)
        del self._nodes[name]
        self._freed[name] = self._now if until is None else until

    def _enter(self, name: str, phase: NodePhase) -> None:
        self._settle(name)
        if name in self._nodes:
            self._nodes[name].phase, self._nodes[name].entered = phase, self._now

    def _count(self, nodes: Iterable[str], change: int) -> None:
        for name in nodes:
            self._settle(name)
            self._training[name] += change

    def _fragment_ends(self, training: str, generation: int) -> None:
        self._count(self._fragments.pop((training, generation), ()), -1)

    def _settle(self, name: str, until: float | None = None) -> None:
        """Account for a node's time up to now, or until an earlier time: what was counted after it is taken back."""
        if name in self._nodes:
            until = self._now if until is None else until
            self._count_time(self._account, name, until)
            self._nodes[name].since = until

    def _count_time(self, account: NodeTime, name: str, until: float) -> None:
        node = self._nodes[name]
        phase = NodePhase.TRAINING if self._training[name] > 0 else node.phase
        account.phases[phase] += (until - node.since) / account.shared_slots
        if phase is NodePhase.TRAINING:
            account.slot_seconds += (until - node.since) * self._most_slots.get((node.block, name), 1)
