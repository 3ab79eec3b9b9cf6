"""The planner: time-stamped events in, actions out. Pure: no clock, no I/O, no Parsl, no torch.

The planner decides twice with the same policy. Over the nodes whose slots are ready, it decides which trainer runs
where. Over those plus the nodes that could be obtained (blocks that are starting, windows that pay for their own
start-up), it decides how many nodes are wanted in total: the difference is requested, a surplus is released.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidApp, PlanningError
from freetrain_parsl.places import slot_place
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.alike import without_surplus
from freetrain_parsl.planning.blocks import Holdings
from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool, PoolNode, Window
from freetrain_parsl.planning.node_kinds import allocate_over_kinds, kinds_of
from freetrain_parsl.planning.node_survival import Outlook, Prospect
from freetrain_parsl.planning.placement import check_allocation
from freetrain_parsl.planning.settings import PlannerSettings, SettingsInSeconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.sizes import AllowedCounts

logger = logging.getLogger(__name__)


@dataclass
class _Member:
    """A node whose slots are ready."""

    node: PoolNode
    block: str


class _Members(dict[str, _Member]):
    """Unit -> member, and the units of each machine; changed by `add` and `drop` only."""

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[str, dict[str, _Member]] = {}
        """Machine -> its units."""

    def add(self, name: str, member: _Member) -> None:
        """Add a unit, or replace it."""
        self.drop(name)
        self[name] = member
        self.units.setdefault(member.node.machine, {})[name] = member

    def drop(self, name: str) -> _Member | None:
        """Remove a unit, if it is there."""
        member = self.pop(name, None)
        if member is not None:
            machine = member.node.machine
            del self.units[machine][name]
            if not self.units[machine]:
                del self.units[machine]
        return member


_IN_PASSING = (ev.Tick, ev.TrainerProgressed, ev.TasksWaiting)
"""Events that change neither the nodes nor who has them."""


@dataclass
class PlannerStatistics:
    """Statistics of the decisions so far; `plans`: number of new decisions."""

    plans: int = 0
    solve_seconds: list[float] = field(default_factory=list)
    refused: int = 0


class Planner:
    """Turns events into actions.

    Parameters
    ----------
    policy
        Allocates the nodes.
    settings
        Assumptions about the site.
    on_decision
        Called with (time, purpose, decision) after each accepted solve, for records; must not call the planner. The
        purpose is ``assign`` or ``demand``.
    slots_per_node
        Slots of a node if trainers share nodes: slots are then what it allocates, and `PoolNode.host` is their node. 1:
        it allocates whole nodes.
    """

    def __init__(
        self,
        policy: Policy,
        settings: SettingsInSeconds | None = None,
        on_decision: Callable[[float, str, Decision], None] | None = None,
        slots_per_node: int = 1,
    ) -> None:
        self.policy = policy
        self.slots_per_node = slots_per_node
        self.settings = settings or PlannerSettings().in_seconds()
        self.statistics = PlannerStatistics()
        self.outlook = Outlook()
        self._on_decision = on_decision
        self._trainers: dict[str, PlannedJob] = {}
        """Live trainers; what they have done since the last decision is in `_work_left` and `_service`."""
        self._work_left: dict[str, float] = {}
        self._service: dict[str, float] = {}
        self._members = _Members()
        self._holdings = Holdings(self.settings)
        self._assigned: dict[str, frozenset[str]] = {}
        self._lent: frozenset[str] = frozenset()
        self._tasks = ev.TasksWaiting(0.0, 0)
        self._sought: tuple[float, frozenset[str], frozenset[str]] = -math.inf, frozenset(), frozenset()
        """Until when, and for which trainers, nodes of which kinds are known to be of use beyond all others."""
        self._settle_until: float | None = None
        self._vacated: frozenset[str] = frozenset()
        """Machines that close too soon for those that were on them; they stay empty then."""
        self._vacating: list[float] | None = None
        """When members have to be vacated, in order; ``None``: unknown since an event or a decision."""
        self._dirty = False
        self._planned_at = -math.inf
        self._now = -math.inf

    # State that the driver may read.

    @property
    def assigned(self) -> Allocation:
        """Trainer -> nodes, as last returned to the driver."""
        return dict(self._assigned)

    @property
    def trainers(self) -> tuple[PlannedJob, ...]:
        """The live trainers, in order of submission."""
        self._note_work_done()
        return tuple(sorted(self._trainers.values(), key=lambda trainer: (trainer.submitted, trainer.name)))

    @property
    def has_trainers(self) -> bool:
        """Whether any trainer is live."""
        return bool(self._trainers)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows as last seen."""
        return self._holdings.windows

    def wake_at(self, now: float) -> float:
        """Return the latest time of the next event that the planner needs (a `Tick` is enough); infinity if none."""
        if self._vacating is None:
            margins, usual = self._margins(), self.settings.closing_margin
            nodes = [member.node for member in self._members.values()]
            self._vacating = sorted({node.closes_or_inf - margins.get(node.machine, usual) for node in nodes})
        later = bisect_right(self._vacating, now)
        settles = () if self._settle_until is None else (self._settle_until,)
        again = (self._planned_at + self.settings.replan_interval,) if self._trainers else ()
        due = chain(self._vacating[later : later + 1], self._holdings.wakes(), settles, again)
        return min((time for time in due if time > now), default=math.inf)

    # Events.

    def advance(self, *events: ev.Event) -> ev.Actions:
        """Process events and return the resulting actions.

        The planner's time never goes back: an event earlier than the latest one is moved to the time of the latest.

        Raises
        ------
        InvalidApp
            A submitted trainer has the name of a live one; nothing has changed.
        """
        if not events:
            return []
        due = self.wake_at(self._planned_at)
        moved = self._in_order(events)
        self._count_service(moved[-1].time)
        for event in moved:
            if not isinstance(event, _IN_PASSING):
                self._vacating = None
            self._take(event)
        self._now = now = moved[-1].time
        if not self._dirty and now < due:
            return []
        self._dirty, self._planned_at, self._vacating = False, now, None
        self.statistics.plans += 1
        return self._plan(now)

    def _in_order(self, events: Iterable[ev.Event]) -> list[ev.Event]:
        """Return the events, each moved to the latest time so far if it is earlier."""
        moved, now = [], self._now
        for event in events:
            now = max(now, event.time)
            moved.append(event if event.time == now else replace(event, time=now))
        return moved

    def _count_service(self, now: float) -> None:
        """Add the time since the last events to the service of each trainer that had nodes."""
        if not math.isfinite(self._now):
            return
        for name, nodes in self._assigned.items():
            self._service[name] += len(nodes) * (now - self._now)

    def _note_work_done(self) -> None:
        """Note what has happened since the last decision in the trainers: reports of it are frequent."""
        for name, trainer in self._trainers.items():
            left, service = self._work_left.get(name, trainer.work_left), self._service[name]
            if left != trainer.work_left or service != trainer.service:
                self._trainers[name] = replace(trainer, work_left=left, service=service)
        self._work_left.clear()

    def _take(self, event: ev.Event) -> None:  # noqa: C901 - a case for each event
        match event:
            case ev.Tick():
                pass
            case ev.WindowsSeen():
                news = self._holdings.see(event)
                self._dirty = self._dirty or news
            case ev.WindowsOutdated():
                self._holdings.doubt()
            case ev.BlockStarted():
                self._holdings.start(event, self._machines)
            case ev.BlockEnded():
                gone = [name for name, member in self._members.items() if member.block == event.block]
                self._drop(gone, event.time)
                self._holdings.end(event.block, event.time, refused=event.refused)
            case ev.NodesJoined():
                new = dict.fromkeys(node.machine for node in event.nodes if node.machine not in self._machines)
                self._vacated = frozenset(machine for machine in self._vacated if machine in self._machines)
                for node in event.nodes:
                    self._members.add(node.name, _Member(node, event.block))
                    self._holdings.join(event.block, node.machine)
                self.outlook.opened(event.time, new)
                if self._settle_until is None and self._holdings.still_joining(self._complete_machines):
                    self._settle_until = event.time + self.settings.settle
                self._dirty = True
            case ev.NodesLeft():
                leaving = [self._members[name] for name in event.nodes if name in self._members]
                blocks = {member.node.machine: member.block for member in leaving}
                self._drop(event.nodes, event.time)
                for machine in blocks.keys() - self._machines:
                    self._holdings.lack(blocks[machine], machine, event.time)
                    self._holdings.doubt()
            case ev.NodesClosing():
                soon = event.closes - event.time <= self.settings.startup
                if soon:
                    self._holdings.make_way(event.nodes, event.time, event.closes)
                    self._dirty = True
                for machine in event.nodes:
                    for member in self._members.units.get(machine, {}).values():
                        member.node = replace(member.node, closes=min(event.closes, member.node.closes_or_inf))
                        if soon:
                            self._holdings.doubt()
                        self._dirty = True
            case ev.NodesForecast():
                # Plans are made from requested walltimes: they show which nodes are likely to be needed soon, not when.
                for name, closes in event.closes.items():
                    if name in event.due:
                        self.outlook.seen(event.time, name, Prospect.DUE)
                    else:
                        self.outlook.seen(event.time, name, Prospect.UNNEEDED if closes is None else Prospect.PLANNED)
            case ev.TrainerSubmitted():
                if event.trainer.name in self._trainers:
                    raise InvalidApp(
                        f"a live trainer is already named {event.trainer.name!r}; give this one another name"
                    )
                self._trainers[event.trainer.name] = event.trainer
                self._service[event.trainer.name] = event.trainer.service
                self._dirty = True
            case ev.TrainerProgressed():
                if event.trainer in self._trainers:
                    self._work_left[event.trainer] = event.work_left
            case ev.TrainerLearned():
                if (trainer := self._trainers.get(event.trainer.name)) is not None:
                    self._work_left.pop(trainer.name, None)
                    self._trainers[trainer.name] = replace(event.trainer, since=trainer.since, service=trainer.service)
                    self._dirty = self._dirty or _sizes_of(event.trainer) != _sizes_of(trainer)
            case ev.TrainerFinished() | ev.TrainerFailed() | ev.TrainerWithheld():
                for known in (self._trainers, self._assigned, self._work_left, self._service):
                    known.pop(event.trainer, None)
                self._dirty = True
            case ev.TrainerHolds():
                if event.trainer in self._trainers:
                    others = (nodes for name, nodes in self._assigned.items() if name != event.trainer)
                    self._assigned[event.trainer] = event.nodes - frozenset().union(*others)
                    self._dirty = True
            case ev.TasksWaiting():
                self._dirty = self._dirty or (event.nodes_wanted, event.busy) != (
                    self._tasks.nodes_wanted,
                    self._tasks.busy,
                )
                self._tasks = event
            case _:
                raise PlanningError(f"the planner does not know events of type {type(event).__name__}")

    def _drop(self, names: Iterable[str], now: float) -> None:
        dropped = [member for name in names if (member := self._members.drop(name)) is not None]
        blocks = {member.node.machine: member.block for member in dropped}
        for machine in blocks.keys() - self._machines:
            self.outlook.closed(now, [machine], given_back=self._holdings.is_over(blocks[machine], now))
        self._dirty = True

    # Planning.

    def _plan(self, now: float) -> ev.Actions:
        margins = self._margins()
        nodes = [member.node for member in self._members.values()]
        self._vacated = frozenset(machine for machine in self._vacated if machine in self._machines) | {
            node.machine
            for node in nodes
            if node.closes_or_inf - now <= margins.get(node.machine, self.settings.closing_margin)
        }
        usable = {node.name: node for node in nodes if node.machine not in self._vacated}
        actions = self._lend(usable)
        pool = self._pool((node for name, node in usable.items() if name not in self._lent), now)
        if self._settle_until is not None and (
            now >= self._settle_until or not self._holdings.still_joining(self._complete_machines)
        ):
            self._settle_until = None
        actions += self._reassign(pool, now)
        actions += self._adjust_blocks(pool, now)
        return actions

    def _margins(self) -> dict[str, float]:
        """Return how long before its closing a machine is vacated that trainers share; others, by the closing margin.

        The margin is for one of them. They save at the same time to the same storage, so that the others add theirs.
        """
        seconds: dict[str, list[float]] = {}
        for name, nodes in self._assigned.items():
            if len(nodes) < self.slots_per_node:
                for machine in {self._members[node].node.machine for node in nodes if node in self._members}:
                    seconds.setdefault(machine, []).append(self._trainers[name].save_seconds)
        return {machine: self.settings.closing_margin + sum(each) - max(each) for machine, each in seconds.items()}

    def _pool(self, nodes: Iterable[PoolNode], now: float) -> Pool:
        """Make a pool in which nodes of unknown closing have an expected one."""
        outlook = self.outlook
        return Pool(
            (
                replace(
                    node,
                    expected=now + outlook.remaining(node.machine, now),
                    closing_rate=outlook.closing_rate(node.machine, now),
                )
                if node.closes is None
                else node
                for node in nodes
            ),
            outlook.horizon(self._mean_start()),
            self._holdings.may_be_requested,
            self.slots_per_node if self.slots_per_node > 1 else None,
        )

    def _mean_start(self) -> float:
        """Return the mean cost of a start over the live trainers, seconds."""
        return fmean(trainer.costs.start for trainer in self._trainers.values()) if self._trainers else 0.0

    def _lend(self, usable: dict[str, PoolNode]) -> ev.Actions:
        """Lend nodes to ordinary tasks, which are short and have priority: unused first, then earliest-closing."""
        lent = busy = frozenset(self._tasks.busy & usable.keys())
        if self._tasks.nodes_wanted:
            taken = frozenset().union(*self._assigned.values())
            order = sorted(usable.values(), key=lambda n: (n.name in taken, n.closes_or_inf, n.name))
            spare = [node.name for node in order if node.name not in busy]
            lent = busy | frozenset(spare[: self._tasks.nodes_wanted])
        if lent == self._lent:
            return []
        self._lent = lent
        return [ev.Lend(lent)]

    def _reassign(self, pool: Pool, now: float) -> ev.Actions:
        current = {
            name: kept for name, nodes in self._assigned.items() if (kept := frozenset(n for n in nodes if n in pool))
        }
        for name in self._assigned.keys() - current.keys():
            self._trainers[name] = replace(self._trainers[name], since=now)  # back to the end of the queue
        trainers = without_surplus(self.trainers, current, len(pool))
        trainers = [self._pinned(trainer, current.get(trainer.name, frozenset())) for trainer in trainers]
        if self._settle_until is not None:
            # More nodes are about to join: grow once for all of them; only trainers without nodes start now.
            trainers = [self._staying(t, current[t.name]) if t.name in current else t for t in trainers]
        decision = self._decide("assign", pool, trainers, current, now)
        allocation = decision.allocation if decision is not None else self._last_good(current)
        actions: ev.Actions = []
        for name in sorted({*self._assigned, *allocation}):
            before, after = self._assigned.get(name, frozenset()), allocation.get(name, frozenset())
            if before != after:
                actions.append(_reassignment(name, before, after))
        for name in {*self._assigned, *allocation}:
            if bool(self._assigned.get(name)) != bool(allocation.get(name)):
                self._trainers[name] = replace(self._trainers[name], since=now)
        self._assigned = {name: nodes for name, nodes in allocation.items() if nodes}
        # Nodes are released before they are assigned, so that the driver can act in this order.
        return sorted(actions, key=lambda action: isinstance(action, (ev.Grow, ev.Assign)))

    def _pinned(self, trainer: PlannedJob, nodes: frozenset[str]) -> PlannedJob:
        """Keep the nodes of a trainer that ends before a rescale would pay off."""
        seconds_left = self._seconds_left(trainer, nodes)
        return trainer if seconds_left is None or seconds_left > trainer.costs.up else self._staying(trainer, nodes)

    def _seconds_left(self, trainer: PlannedJob, nodes: frozenset[str]) -> float | None:
        """Return the seconds of work left on its nodes; ``None`` if it does not run on them or that is unknown."""
        kind = self._kind_of(nodes)
        here = trainer if kind is None else trainer.on_kind(kind)
        if not _can_run(here, nodes) or (rate := here.rate(len(nodes))) <= 0 or here.curve.relative:
            return None
        return here.work_left / rate

    def _decide(
        self, purpose: str, pool: Pool, trainers: list[PlannedJob], current: Allocation, now: float
    ) -> Decision | None:
        """Call the policy; return ``None`` and log the error if it fails or its allocation is invalid."""
        try:
            decision = allocate_over_kinds(self.policy, pool, trainers, current, now)
            check_allocation(decision.allocation, pool, trainers, any_layout=self.policy.any_layout)
        except Exception:  # a policy may be user code: its errors must not stop running training jobs
            logger.exception("policy %r failed or gave an invalid allocation; keeping the last one", self.policy.name)
            self.statistics.refused += 1
            return None
        self.statistics.solve_seconds.append(decision.solve_seconds)
        if self._on_decision is not None:
            self._on_decision(now, purpose, decision)
        return decision

    def _last_good(self, current: Allocation) -> Allocation:
        return {name: nodes for name, nodes in current.items() if _can_run(self._trainers[name], nodes)}

    # Blocks.

    def _adjust_blocks(self, pool: Pool, now: float) -> ev.Actions:
        """Request the nodes wanted beyond those held or awaited; release those not needed."""
        holdings = self._holdings
        may_wait = holdings.kinds_that_may_wait
        if not (len(holdings) or holdings.windows or self._tasks.nodes_wanted or may_wait):
            return []  # the nodes do not come from blocks: nothing to request or release
        lost = holdings.give_up(now) + holdings.withdraw(now)
        machines = self._machines
        awaited = [unit for node in holdings.awaited(machines, now) for unit in self._units_of(node)]
        offers = holdings.offers(machines, now)
        offered = [
            unit
            for window, names in offers
            for name in names
            for unit in self._units_of(
                PoolNode(name, window.closes, startup=holdings.startup_on(window.node_kind), node_kind=window.node_kind)
            )
        ]
        # Nodes requested now arrive after those that close soon have closed.
        ready = now + holdings.startup + self.settings.closing_margin
        here = [*pool.values(), *awaited]
        lasting = [node for node in here if node.closes_or_inf > ready]
        wanted = self._wanted(lasting, offered, now)
        kind_of = {node.machine: node.node_kind for node in here}
        in_use = {node.machine for node in here if node.name in wanted}
        spare = Counter(kind for machine, kind in kind_of.items() if machine not in in_use)
        waiting = max(0, self._tasks.nodes_wanted + len(self._tasks.busy) - len(self._lent))
        waiting_tasks = -(-waiting // self.slots_per_node)
        chosen = _beyond(lasting, offered, wanted)
        missing = max(0, waiting_tasks - spare.total())
        growing = holdings.kinds if missing else {node.node_kind for node in offered if node.machine in chosen}
        for kind in growing:
            holdings.keep(kind)
        left = holdings.left_to_waiting(chosen, offers)
        requested = chosen - left.keys()
        actions = lost + (holdings.request(requested, missing, offers, now) if requested or missing else [])
        awaited_kinds = Counter(left.values()) + self._wanted_beyond(lasting, offered, wanted, now)
        for kind in sorted(may_wait | holdings.kinds):
            actions += holdings.await_nodes(kind, awaited_kinds[kind], now)
        may_go = spare.total() - waiting_tasks
        for kind in sorted(holdings.kinds - growing):
            released, nodes = holdings.release(kind, min(spare[kind], may_go), self._used, now)
            may_go -= len(nodes)
            for unit in [unit for machine in nodes for unit in self._members.units.get(machine, ())]:
                self._members.drop(unit)
            self.outlook.closed(now, nodes, given_back=True)
            actions += released
        return actions

    def _wanted_beyond(
        self, had: list[PoolNode], offered: list[PoolNode], wanted: frozenset[str], now: float
    ) -> Counter[str]:
        """Return how many nodes of each kind that may become idle would be used, if a single one of them would be.

        Those that could be used only together might be held without use until they are complete. That one would be used
        holds for `idle_timeout`, during which no block that waits would be withdrawn either, unless another one is to
        be queued: with what the last one got, a further node may be of no use.
        """
        room = sum(trainer.max_nodes for trainer in self._trainers.values()) - len(wanted)
        unknown = [
            unit
            for kind in self._holdings.kinds_that_may_wait
            for unit in self._units_of(
                PoolNode(f"(any {kind})", startup=self._holdings.startup_on(kind), node_kind=kind)
            )
        ]
        if not unknown or room <= 0:
            return Counter()
        nodes = -(-room // self.slots_per_node)
        until, trainers, sought = self._sought
        to_queue = any(self._holdings.may_be_queued(kind, nodes, now) for kind in sought)
        if now >= until or trainers != self._trainers.keys() or to_queue:
            kinds = {node.name: node.node_kind for node in chain(had, offered, unknown)}
            more = Counter(kinds[name] for name in self._wanted(had, [*offered, *unknown], now))
            more.subtract(kinds[name] for name in wanted)
            sought = frozenset(kind for kind, count in more.items() if count > 0)
            until = now + self.settings.idle_timeout if sought else -math.inf
            self._sought = until, frozenset(self._trainers), sought
        return Counter(dict.fromkeys(sought & {unit.node_kind for unit in unknown}, nodes))

    @property
    def _used(self) -> frozenset[str]:
        """The machines that training jobs and tasks have."""
        units = self._lent.union(*self._assigned.values())
        return frozenset(self._members[unit].node.machine if unit in self._members else unit for unit in units)

    @property
    def _machines(self) -> AbstractSet[str]:
        """The machines of which any slot is ready, now."""
        return self._members.units.keys()

    @property
    def _complete_machines(self) -> frozenset[str]:
        """The machines of which all slots are ready."""
        return frozenset(machine for machine, units in self._members.units.items() if len(units) >= self.slots_per_node)

    def _units_of(self, node: PoolNode) -> list[PoolNode]:
        """Return what is allocated of a node that has not joined: itself, or its slots."""
        if self.slots_per_node == 1:
            return [node]
        return [replace(node, name=slot_place(node.name, lane), host=node.name) for lane in range(self.slots_per_node)]

    def _wanted(self, had: list[PoolNode], offered: list[PoolNode], now: float) -> frozenset[str]:
        """Return the nodes that trainers would use if every obtainable node were available."""
        if not self._trainers:
            return frozenset()
        everything = self._pool([*had, *offered], now)
        current = {n: kept for n, nodes in self._assigned.items() if (kept := frozenset(nodes & everything.keys()))}
        considered = without_surplus(self.trainers, current.keys() | self._assigned.keys(), len(everything))
        asking = (self._worth_growing(t, current.get(t.name, frozenset())) for t in considered)
        trainers = [trainer for trainer in asking if trainer is not None]
        decision = self._decide("demand", everything, trainers, current, now)
        allocation = decision.allocation if decision is not None else current
        return frozenset().union(*allocation.values())

    def _worth_growing(self, trainer: PlannedJob, lasting: frozenset[str]) -> PlannedJob | None:
        """Let a trainer request no more nodes if it will finish on those it has before a new block is ready."""
        seconds_left = self._seconds_left(trainer, self._assigned.get(trainer.name, frozenset()))
        if seconds_left is None or seconds_left > self._holdings.startup + trainer.costs.up:
            return trainer
        return self._staying(trainer, lasting) if len(lasting) >= trainer.min_nodes else None

    def _staying(self, trainer: PlannedJob, nodes: frozenset[str]) -> PlannedJob:
        """Limit a trainer to as many nodes as it has, of the same kind."""
        kind, most = self._kind_of(nodes), max(trainer.min_nodes, len(nodes))
        return replace(trainer, max_nodes=most, node_kinds=(kind,) if kind else trainer.node_kinds)

    def _kind_of(self, nodes: frozenset[str]) -> str | None:
        """Return the kind of a trainer's nodes, which is the same for all; ``None`` if none of them is ready."""
        return next((self._members[name].node.node_kind for name in nodes if name in self._members), None)


def _beyond(had: list[PoolNode], offered: list[PoolNode], wanted: frozenset[str]) -> frozenset[str]:
    """Return the machines of the wanted nodes among those offered that no node already held can replace.

    A policy may prefer a node that is free for longer to one whose block ends; that is no reason to hold both.
    """
    chosen: set[str] = set()
    kinds = {node.name: node.node_kind for node in chain(had, offered)}
    for kind in kinds_of(offered):
        candidates = [node for node in offered if node.node_kind == kind and node.name in wanted]
        best = dict.fromkeys(n.machine for n in sorted(candidates, key=lambda node: (-node.lasts_until, node.name)))
        slots = Counter(node.machine for node in offered if node.node_kind == kind)
        missing = sum(kinds[name] == kind for name in wanted) - sum(node.node_kind == kind for node in had)
        for machine in best:
            if missing <= 0:
                break
            chosen.add(machine)
            missing -= slots[machine]
    return frozenset(chosen)


def _sizes_of(trainer: PlannedJob) -> tuple[int, int, AllowedCounts]:
    """Return what limits a trainer's number of nodes."""
    return trainer.min_nodes, trainer.max_nodes, trainer.allowed_counts


def _can_run(trainer: PlannedJob, nodes: frozenset[str]) -> bool:
    """Return whether a trainer can continue on its nodes, even if its largest number has become smaller."""
    return len(nodes) >= trainer.min_nodes and len(nodes) in trainer.allowed_counts


def _reassignment(name: str, before: frozenset[str], after: frozenset[str]) -> ev.Reassign:
    if not after:
        return ev.Stop(name, after)
    if not before:
        return ev.Assign(name, after)
    return ev.Grow(name, after) if before < after else ev.Shrink(name, after)
