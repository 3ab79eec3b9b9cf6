"""The slot registry: the blocks that are held or requested, and their slots that have connected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.node_kinds import KindOfSlots, units_per_node
from freetrain_parsl.places import node_of, slot_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LONGEST_ASIDE = 1800.0  # seconds

__all__ = ["Block", "Slot", "SlotRegistry"]


@dataclass
class Slot:
    """A slot that has connected.

    Parameters
    ----------
    name, token
        Its name, and the token of its HTEX task.
    node, block
        Where it runs.
    lane
        Its number on its node, from 0, where jobs share nodes; ``None``: a job has whole nodes.
    heard
        Time of its last message, seconds since the epoch.
    busy
        Name of the training job, or number of the ordinary task, that it runs; ``None``: idle.
    leaving
        Whether the batch system reclaims its node: no new work is assigned to it.
    node_kind
        Kind of its node; empty where there is one kind only.
    faults
        Number of its messages that could not be handled.
    denials
        Number of consecutive heartbeats that contradict its assignment.
    waited
        Seconds for which its training job has waited for other members there, according to its last heartbeat.
    """

    name: str
    token: str
    node: str
    block: str
    heard: float
    lane: int | None = None
    busy: str | int | None = None
    leaving: bool = False
    node_kind: str = ""
    faults: int = 0
    denials: int = 0
    waited: float = 0.0

    @property
    def place(self) -> str:
        """The unit of the pool that it belongs to, or is."""
        return self.node if self.lane is None else slot_place(self.node, self.lane)


@dataclass
class Block:
    """A block, from its request to its end; times in seconds since the epoch."""

    name: str
    nodes: tuple[str, ...]
    """The nodes that it has, or is meant for; empty while it waits for any one."""
    seconds: float
    """Its walltime."""
    closes: float | None
    """Time at which its window closes."""
    node_kind: str = ""
    started: float | None = None
    ends: float | None = None
    """Time at which it loses its nodes, once it has started; ``None`` if unknown."""
    waited: float = 0.0
    """Time of the last survey that showed it in the queue."""
    held: float | None = None
    """Time of the last survey that showed it on its nodes."""
    yields: float | None = None
    """Time at which it releases its nodes early."""
    yields_because: str = ""
    warned: bool = False
    """Whether the batch system has signalled its processes that it reclaims the nodes."""
    joined: float | None = None
    """Time at which its first slot connected."""
    works: bool = False
    """Whether it has had a slot for long enough to prove that blocks can start here."""
    releasing: str = ""
    """Reason for releasing it; empty if it is not being released."""
    refilled: float | None = None

    def start(self, now: float, nodes: tuple[str, ...], ends: float | None) -> None:
        """Record that it holds `nodes` now, until its walltime `ends` or its window closes.

        It cannot last longer than its walltime from now; a later end is due to a stepped clock.
        """
        self.started, self.held, self.nodes = now, now, nodes
        ends = None if ends is None else min(ends, now + self.seconds)
        times = [time for time in (ends, self.closes) if time is not None]
        self.ends = min(times, default=None)

    def node_of(self, host: str) -> str:
        """Return the node name of a host; the host's own name may be longer or shorter than the batch system's."""
        short = host.partition(".")[0]
        return next((node for node in self.nodes if node == host or node.partition(".")[0] == short), host)

    def loses_nodes_at(self, now: float) -> float:
        """Return the time at which it loses its nodes, or the latest possible one if its start is not known yet."""
        latest = now + self.seconds if self.ends is None else self.ends
        return min(time for time in (latest, self.closes, self.yields) if time is not None)


class _Slots(dict[str, Slot]):
    """Slot name -> slot, with indices of nodes, blocks and tokens; changed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        """Number of times that slots came, left, or were reclaimed."""
        self._by_node: dict[str, dict[str, Slot]] = {}
        self._by_block: dict[str, dict[str, Slot]] = {}
        self._by_token: dict[str, dict[str, Slot]] = {}

    def __setitem__(self, name: str, slot: Slot) -> None:
        self.pop(name)
        super().__setitem__(name, slot)
        self.changes += 1
        for index, key in self._indices(slot):
            index.setdefault(key, {})[name] = slot

    def __delitem__(self, name: str) -> None:
        if self.pop(name) is None:
            raise KeyError(name)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a slot, and return it if it was there."""
        slot = super().pop(name, None)
        if slot is None:
            return default
        self.changes += 1
        for index, key in self._indices(slot):
            del index[key][name]
            if not index[key]:
                del index[key]
        return slot

    def _indices(self, slot: Slot) -> Iterator[tuple[dict[str, dict[str, Slot]], str]]:
        yield self._by_node, slot.node
        yield self._by_block, slot.block
        yield self._by_token, slot.token

    def on(self, node: str) -> list[Slot]:
        """Return the slots of a node, ordered by name."""
        here = self._by_node.get(node, {})
        return [slot for _, slot in sorted(here.items())] if len(here) > 1 else list(here.values())

    def of_block(self, block: str) -> list[Slot]:
        """Return the slots of a block, in the order in which they joined."""
        return list(self._by_block.get(block, {}).values())

    def by_token(self, token: str) -> Slot | None:
        """Return the slot of an HTEX task."""
        return next(iter(self._by_token.get(token, {}).values()), None)

    def at(self, place: str) -> list[Slot]:
        """Return the slots of a unit, ordered by name."""
        return [slot for slot in self.on(node_of(place)) if slot.place == place]


class SlotRegistry:
    """The driver's blocks and slots, by name.

    The pool consists of units: whole nodes, or the slots of nodes that jobs share. A unit is complete, and joins the
    pool, once all its slots have connected.

    Parameters
    ----------
    slots_per_node
        Number of slots of a node.
    kinds
        Kind of nodes -> its slots, where there are several kinds; `slots_per_node` is not used then.
    share_nodes
        See `units_per_node`.
    """

    def __init__(
        self,
        slots_per_node: int,
        kinds: Mapping[str, KindOfSlots] = MappingProxyType({}),
        *,
        share_nodes: bool = False,
    ) -> None:
        self.kinds = kinds or {"": KindOfSlots(slots_per_node)}
        self.units_per_node = units_per_node(self.kinds.values(), share_nodes=share_nodes)
        """Number of units of a node: of its slots where jobs share nodes, or 1."""
        self.slots = _Slots()
        self.blocks: dict[str, Block] = {}
        self.tasks_queued = 0
        """Number of HTEX tasks of slots that have neither connected nor failed."""
        self._complete: set[str] = set()
        self._aside: dict[str, float] = {}
        self._times_aside: Counter[str] = Counter()
        self.start_errors: dict[str, str] = {}
        """Node -> reason why a slot could not start there, until all its slots have started."""
        self.avoided: frozenset[str] = frozenset()
        """The free nodes on which no block should start at present: they are set aside."""

    @property
    def slots_per_node(self) -> int:
        """The number of slots of a node, of the kind that has most."""
        return max(kind.per_node for kind in self.kinds.values())

    @property
    def slots_per_unit(self) -> int:
        """The number of slots of a unit, of the kind of node that has most."""
        return self.slots_per_node // self.units_per_node

    def free_lane(self, node: str, wanted: int | None) -> int | None:
        """Return the lane of a new slot: `wanted`, or else the lowest that is free; ``None`` for whole nodes."""
        if self.units_per_node == 1:
            return None
        taken = {slot.lane for slot in self.slots.on(node)}
        lanes = [lane for lane in range(self.units_per_node) if lane not in taken]
        if wanted in lanes:
            return wanted
        return lanes[0] if lanes else self.units_per_node + len(taken)

    def kinds_on(self, places: Iterable[str]) -> set[str]:
        """Return the kinds of the nodes of units that have slots."""
        if len(self.kinds) == 1:
            return set(self.kinds) if any(self.slots.at(place) for place in places) else set()
        return {slot.node_kind for place in places for slot in self.slots.at(place)}

    def transports_on(self, places: Iterable[str]) -> set[str]:
        """Return the transports between which only checkpoints carry a training job's state; see `KindOfSlots`."""
        return {self.kinds[kind].transport for kind in self.kinds_on(places)}

    def drop_block(self, name: str) -> Block | None:
        """Remove a block that has ended.

        The HTEX tasks of its slots that had not connected are assumed to be gone with its managers: HTEX detects this
        only after its heartbeat timeout, and until then a later block would wait for them. A surplus task does no harm.
        """
        block = self.blocks.pop(name, None)
        if block is not None and block.started is not None:
            self.tasks_queued = max(0, self.tasks_queued - self._lacking(block))
        return block

    def of_block(self, block: str) -> list[Slot]:
        """Return the slots of a block."""
        return self.slots.of_block(block)

    def by_token(self, token: str) -> Slot | None:
        """Return the slot behind an HTEX task, if it is connected."""
        return self.slots.by_token(token)

    def completes(self, slot: Slot) -> bool:
        """Return whether this new slot completes its unit."""
        place = slot.place
        if place in self._complete or not self._aside.keys().isdisjoint((place, slot.node)) or self._is_short(slot):
            return False
        self._complete.add(place)
        return True

    def incomplete(self, slot: Slot) -> bool:
        """Return whether dropping this slot takes its unit out of the pool."""
        if slot.place not in self._complete:
            return False
        self._complete.discard(slot.place)
        return True

    def completed_without(self, lost: Slot) -> Slot | None:
        """Return a slot that completes the unit of one that was dropped, and joined before: until then it was surplus.

        On a node that jobs share, it gets the other's lane.
        """
        slots = self.slots.on(lost.node)
        if lost.lane is not None and lost.lane < self.units_per_node:
            surplus = next((one for one in slots if one.lane is not None and one.lane >= self.units_per_node), None)
            if surplus is not None and not self.slots.at(lost.place):
                surplus.lane = lost.lane
        here = next(iter(self.slots.at(lost.place)), None)
        block = None if here is None else self.blocks.get(here.block)
        if here is None or here.leaving or block is None or block.releasing:
            return None
        return here if self.completes(here) else None

    def set_aside(self, place: str, now: float, pause: float) -> float:
        """Keep a unit from becoming complete for `pause` seconds, doubled each time; return the actual pause."""
        pause = min(pause * 2 ** self._times_aside[place], _LONGEST_ASIDE)
        self._times_aside[place] += 1
        self._aside[place] = now + pause
        return pause

    def hold_back(self, node: str, until: float, error: str) -> None:
        """Start no slot on a node for some time, none of its units becomes complete: one could not start there."""
        self._aside[node] = max(until, self._aside.get(node, until))
        self.start_errors[node] = error

    @property
    def aside(self) -> frozenset[str]:
        """The nodes that are set aside at present, with all their units."""
        units = Counter(map(node_of, self._aside))
        return frozenset(node for node, count in units.items() if node in self._aside or count >= self.units_per_node)

    @property
    def has_complete_units(self) -> bool:
        """Whether all slots of any unit have started."""
        return bool(self._complete)

    def holds(self, node: str) -> bool:
        """Return whether a block has this node, or is meant for it."""
        return any(node in block.nodes for block in self.blocks.values())

    def returning(self, now: float) -> list[Slot]:
        """Return one slot of each unit whose time aside, or whose node's, is over; it may be complete again."""
        over = [name for name, until in self._aside.items() if until <= now]
        for name in over:
            del self._aside[name]
        slots = [slot for name in over for slot in self.slots.on(node_of(name)) if name in (slot.place, slot.node)]
        return list({slot.place: slot for slot in reversed(slots)}.values())[::-1]

    def reclaim(self, node: str) -> None:
        """Note that the batch system reclaims a node."""
        for slot in self.slots.on(node):
            slot.leaving = True
        self.slots.changes += 1

    def closing(self, places: Iterable[str]) -> frozenset[str]:
        """Return the units, out of these, whose node the batch system reclaims."""
        return frozenset(place for place in places if any(slot.leaving for slot in self.slots.on(node_of(place))))

    def complete_slots(self, places: Iterable[str]) -> list[Slot] | None:
        """Return all slots of these units, ordered by unit and name; ``None`` if a unit is not complete."""
        names = sorted(places)
        if not self._complete.issuperset(names):
            return None
        return [slot for name in names for slot in self.slots.at(name)]

    def free_slots(self, places: Iterable[str]) -> list[Slot]:
        """Return the idle slots of these units."""
        slots = (slot for place in sorted(places) for slot in self.slots.at(place))
        return [slot for slot in slots if slot.busy is None and not slot.leaving]

    def missing_tasks(self) -> int:
        """Return the number of further HTEX tasks needed for the slots that have not connected."""
        awaited = sum(self._lacking(block) for block in self.blocks.values())
        return max(0, awaited - self.tasks_queued)

    def overdue(self, now: float, patience: float) -> int:
        """Return the number of slots missing `patience` seconds after their block's start; once per `patience`."""
        count = 0
        for block in self.blocks.values():
            since = block.refilled or block.started
            if since is not None and now - since > patience and (lacking := self._lacking(block)):
                block.refilled = now
                count += lacking
        return count

    def _lacking(self, block: Block) -> int:
        """Return the number of slots that a block lacks, apart from nodes on which none can start at present."""
        held_back = self._aside.keys() & self.start_errors.keys() & set(block.nodes)
        connected = sum(slot.node not in held_back for slot in self.of_block(block.name))
        return max(0, ((len(block.nodes) or 1) - len(held_back)) * self.kinds[block.node_kind].per_node - connected)

    def _is_short(self, slot: Slot) -> bool:
        """Return whether slots of a slot's unit are missing, or it is surplus on a node that has all its units."""
        if slot.lane is not None and slot.lane >= self.units_per_node:
            return True
        return len(self.slots.at(slot.place)) < self.kinds[slot.node_kind].per_node // self.units_per_node
