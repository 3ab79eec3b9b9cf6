"""The batch system's scheduler as a pure state machine: FCFS with EASY backfill, and preemption.

Main jobs are scheduled first come, first served, as if preemptible jobs did not exist. The first that does not fit
gets a reservation at the time when, according to the requested walltimes, enough nodes are free; later ones may start
before it if that does not delay it (EASY: Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 12(6), 2001). If a main
job needs a preemptible job's nodes, that job is preempted, and the main job starts when the last of its nodes is
released.

Preemptible jobs start only on idle nodes that the plan (`Plan`) does not need until their walltime ends, and have no
reservations.

There is no clock and no I/O here: times are numbers on a clock chosen by the caller (seconds in the daemon, integer
microseconds in its accounting), and calls return the actions that the caller must carry out.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.nodesets import NodeNames, take_from
from freetrain_parsl.cluster.plan import Plan, PlannedStart
from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.cluster.workload import MainJob


@dataclass(frozen=True)
class Job:
    """The request of a job; the walltime is in seconds, the id is unique among the jobs of a scheduler."""

    id: str
    nodes: int
    walltime: float
    preemptible: bool = False
    """Whether main jobs have priority over it and may preempt it."""
    nodelist: tuple[str, ...] | None = None
    """Names of the nodes on which it may run; ``None`` for any. Preemptible jobs only: main jobs run on any nodes."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise InvalidSettings(f"job {self.id!r}: it needs at least one node, got {self.nodes}")
        if not (math.isfinite(self.walltime) and self.walltime > 0):
            raise InvalidSettings(f"job {self.id!r}: its walltime must be positive, got {self.walltime!r} s")
        if self.nodelist is not None and not self.preemptible:
            raise InvalidSettings(f"job {self.id!r}: only a preemptible job may specify its nodes")
        if self.nodelist is not None and len(set(self.nodelist)) < self.nodes:
            raise InvalidSettings(
                f"job {self.id!r}: it requests {self.nodes} nodes out of a list of {len(set(self.nodelist))}"
            )


@dataclass(frozen=True)
class StartJob:
    """Start `job` now on these nodes, which are free."""

    job: Job
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class PreemptJob:
    """Terminate this preemptible job now: the main job `needed_by` gets some of its nodes."""

    job: Job
    needed_by: str


Action = StartJob | PreemptJob


@dataclass
class _Holding:
    """A job that holds nodes or was promised them: `started` is false until the last one is released."""

    job: Job
    nodes: int
    start: float
    end: float
    """When its walltime ends."""
    order: int
    started: bool = True
    ending: bool = False
    """It is being terminated."""


@dataclass
class Scheduler:
    """Decides when jobs start or are preempted.

    Parameters
    ----------
    nodes
        Names of the nodes, or their number.
    margin
        Seconds between the end of a preemptible job's walltime and the time at which the plan needs its nodes: the
        time that processes take to end.
    plan_depth
        Number of pending main jobs that the plan considers.
    backfill_depth
        Number of pending main jobs that backfill considers; ``None`` for all.
    """

    nodes: int | Sequence[str]
    margin: float = 0.0
    plan_depth: int = 100
    backfill_depth: int | None = None
    names: NodeNames = field(init=False)
    """The nodes' names and bits."""

    def __post_init__(self) -> None:
        self.names = NodeNames(self.nodes)
        self._queue: list[Job] = []
        self._preemptible_queue: list[Job] = []
        self._main: dict[str, _Holding] = {}
        self._preemptible: dict[str, _Holding] = {}
        self._promised: dict[str, _Holding] = {}
        self._ends: list[tuple[float, int, _Holding]] = []  # of the main jobs; sorted
        self._main_nodes = 0
        self._preemptible_nodes = 0
        self._order = 0

    # -- events ----------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Put a job at the end of its queue.

        Raises
        ------
        InvalidSettings
            It requests more nodes than there are, or nodes that do not exist.
        """
        if job.nodes > len(self.names):
            raise InvalidSettings(f"job {job.id!r}: it requests {job.nodes} nodes, the cluster has {len(self.names)}")
        if job.nodelist is not None:
            self.names.to_set(job.nodelist)
        (self._preemptible_queue if job.preemptible else self._queue).append(job)

    def withdraw(self, job_id: str) -> bool:
        """Remove a job that has not started; return false if there is none with this id."""
        for queue in (self._queue, self._preemptible_queue):
            for position, job in enumerate(queue):
                if job.id == job_id:
                    del queue[position]
                    return True
        if job_id in self._promised:
            self._release_main(self._promised.pop(job_id))
            return True
        return False

    def ending(self, job_id: str, now: float) -> None:
        """Record that a running job is being terminated: its nodes are expected back immediately."""
        holding = self._find(job_id)
        holding.ending = True
        if not holding.job.preemptible:
            self._ends.remove((holding.end, holding.order, holding))
            insort(self._ends, (min(holding.end, now), holding.order, holding))
        holding.end = min(holding.end, now)

    def released(self, job_id: str, node: str) -> None:
        """Record that a running job's processes on one node are gone; other nodes may still have some."""
        holding = self._find(job_id)
        bit = self.names.to_set([node]) & holding.nodes
        holding.nodes &= ~bit
        if holding.job.preemptible:
            self._preemptible_nodes &= ~bit
            if not holding.nodes:
                del self._preemptible[job_id]
        else:
            self._main_nodes &= ~bit
            if not holding.nodes:
                self._release_main(holding)

    def ended(self, job_id: str) -> None:
        """Record that a running job is gone from all its nodes."""
        holding = self._find(job_id)
        if holding.job.preemptible:
            self._preemptible_nodes &= ~holding.nodes
            del self._preemptible[job_id]
        else:
            self._release_main(holding)

    # -- decisions -------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Action]:
        """Decide which jobs start and which are preempted now. Call after every change; repeated calls do nothing."""
        actions: list[Action] = []
        self._schedule_main(now, actions)
        for holding in list(self._promised.values()):
            if not holding.nodes & self._preemptible_nodes:
                del self._promised[holding.job.id]
                self._ends.remove((holding.end, holding.order, holding))
                holding.started, holding.start, holding.end = True, now, now + holding.job.walltime
                insort(self._ends, (holding.end, holding.order, holding))
                actions.append(StartJob(holding.job, self.names.to_names(holding.nodes)))
        if self._preemptible_queue and self._idle:
            self._schedule_preemptible(now, actions)
        return actions

    def _schedule_main(self, now: float, actions: list[Action]) -> None:
        free = len(self.names) - self._main_nodes.bit_count()
        started = 0
        for job in self._queue:
            if job.nodes > free:
                break
            self._start_main(job, now, actions)
            free -= job.nodes
            started += 1
        if started:
            del self._queue[:started]
        if not self._queue or not free or len(self._queue) == 1:
            return
        head, *others = self._queue[: self.backfill_depth and self.backfill_depth + 1]
        shadow, extra, reserved = self._head_reservation(head, now)
        chosen: set[str] = set()
        for job in others:
            if job.nodes > free:
                continue
            in_time = now + job.walltime <= shadow
            if not in_time and job.nodes > extra:
                continue
            if not in_time:
                extra -= job.nodes
            # Jobs that end in time use the head's future nodes: other idle nodes are more valuable to long jobs.
            self._start_main(job, now, actions, prefer=reserved if in_time else ~reserved)
            free -= job.nodes
            chosen.add(job.id)
            if not free:
                break
        if chosen:
            self._queue = [job for job in self._queue if job.id not in chosen]

    def _head_reservation(self, head: Job, now: float) -> tuple[float, int, int]:
        """Return (shadow time, spare nodes at that time, reserved nodes) of the first job, which does not fit now."""
        free = self.names.all & ~self._main_nodes
        count, shadow = free.bit_count(), now
        latest_first: list[int] = []
        for end, _, holding in self._ends:
            if count >= head.nodes and max(end, now) > shadow:
                break
            shadow = max(end, now)
            count += holding.nodes.bit_count()
            latest_first.insert(0, holding.nodes)
        idle = free & ~self._preemptible_nodes
        return shadow, count - head.nodes, take_from(head.nodes, *latest_first, idle, free)

    def _start_main(self, job: Job, now: float, actions: list[Action], prefer: int = -1) -> None:
        """Give a main job its nodes: idle ones, then those being vacated, then those of a victim."""
        idle = self._idle
        nodes = take_from(job.nodes, idle & prefer, idle)
        missing = job.nodes - nodes.bit_count()
        if missing:
            promised = self._main_nodes & self._preemptible_nodes
            emptying = 0
            for holding in self._preemptible.values():
                if holding.ending:
                    emptying |= holding.nodes & ~promised
            nodes |= take_from(missing, emptying)
        while missing := job.nodes - nodes.bit_count():
            victim = self._victim(missing)
            victim.ending = True
            victim.end = min(victim.end, now)
            actions.append(PreemptJob(victim.job, job.id))
            nodes |= take_from(missing, victim.nodes)
        self._order += 1
        holding = _Holding(job, nodes, now, now + job.walltime, self._order)
        self._main[job.id] = holding
        self._main_nodes |= nodes
        insort(self._ends, (holding.end, holding.order, holding))
        if nodes & self._preemptible_nodes:
            holding.started = False
            self._promised[job.id] = holding
        else:
            actions.append(StartJob(job, self.names.to_names(nodes)))

    def _victim(self, missing: int) -> _Holding:
        """Choose a job to preempt: the smallest sufficient one, else the largest; the youngest among equals."""
        candidates = [holding for holding in self._preemptible.values() if not holding.ending]
        enough = [holding for holding in candidates if holding.nodes.bit_count() >= missing]
        if enough:
            return min(enough, key=lambda holding: (holding.nodes.bit_count(), -holding.order))
        return max(candidates, key=lambda holding: (holding.nodes.bit_count(), holding.order))

    def _schedule_preemptible(self, now: float, actions: list[Action]) -> None:
        plan, _ = self._plan(now)
        waiting: list[Job] = []
        for job in self._preemptible_queue:
            allowed = self._idle
            if job.nodelist is not None:
                allowed &= self.names.to_set(job.nodelist)
            fitting = [
                nodes
                for closes, nodes in plan.closings(allowed)
                if closes is None or now + job.walltime <= closes - self.margin
            ]
            nodes = take_from(job.nodes, *fitting)  # earliest-closing first: long windows stay for long jobs
            if nodes.bit_count() < job.nodes:
                waiting.append(job)
                continue
            self._order += 1
            self._preemptible[job.id] = _Holding(job, nodes, now, now + job.walltime, self._order)
            self._preemptible_nodes |= nodes
            actions.append(StartJob(job, self.names.to_names(nodes)))
        self._preemptible_queue = waiting

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> int:
        return self.names.all & ~self._main_nodes & ~self._preemptible_nodes

    @property
    def idle(self) -> tuple[str, ...]:
        """Return the names of the nodes that no job holds or was promised."""
        return self.names.to_names(self._idle)

    @property
    def offered_count(self) -> int:
        """Return the number of nodes without main jobs: idle, or still held by preemptible jobs."""
        return (self._idle | self._preemptible_nodes).bit_count()

    @property
    def preemptible_count(self) -> int:
        """Return the number of nodes that preemptible jobs hold, including jobs being terminated."""
        return self._preemptible_nodes.bit_count()

    @property
    def pending(self) -> tuple[Job, ...]:
        """Return the pending jobs: main ones that were promised nodes, other main ones, preemptible ones."""
        promised = (holding.job for holding in self._promised.values())
        return (*promised, *self._queue, *self._preemptible_queue)

    def expected_starts(self, now: float) -> dict[str, tuple[float, tuple[str, ...]]]:
        """Return the planned (start, nodes) of the pending main jobs, by id; preemptible ones have none."""
        promised = {job_id: (now, self.names.to_names(holding.nodes)) for job_id, holding in self._promised.items()}
        _, reservations = self._plan(now)
        return promised | {item.job_id: (item.start, self.names.to_names(item.nodes)) for item in reservations}

    def free_until(self, now: float) -> dict[str, float | None]:
        """Return idle node -> when it closes for preemptible jobs, ``None`` if the plan does not need it.

        This is `margin` before the plan needs it, and may be in the past.
        """
        if not self._idle:
            return {}
        plan, _ = self._plan(now)
        return {
            name: None if closes is None else max(now, closes - self.margin)
            for closes, nodes in plan.closings(self._idle)
            for name in self.names.to_names(nodes)
        }

    def _plan(self, now: float) -> tuple[Plan, list[PlannedStart]]:
        plan = Plan(
            now,
            self.names.all & ~self._main_nodes,
            [(end, holding.nodes) for end, _, holding in self._ends],
            [(holding.end, holding.nodes) for holding in self._preemptible.values()],
        )
        waiting = self._queue[: self.plan_depth]
        return plan, [plan.reserve(job.id, job.nodes, job.walltime) for job in waiting]

    def _find(self, job_id: str) -> _Holding:
        holding = self._main.get(job_id) or self._preemptible.get(job_id)
        if holding is None or not holding.started:
            raise InvalidSettings(f"job {job_id!r} is not running")
        return holding

    def _release_main(self, holding: _Holding) -> None:
        self._main_nodes &= ~holding.nodes
        self._ends.remove((holding.end, holding.order, holding))
        del self._main[holding.job.id]


def simulate(jobs: Iterable[MainJob], nodes: int | Sequence[str], *, backfill_depth: int | None = None) -> list[float]:
    """Simulate main jobs on a separate cluster; return their start times in the given order.

    Jobs submitted at the same time are served in the given order. A job's run time may exceed its walltime. Integers
    stay exact.
    """
    jobs = list(jobs)
    scheduler = Scheduler(nodes, backfill_depth=backfill_depth)
    starts: list[float] = [math.nan] * len(jobs)
    # (time, 0 for an end | 1 for a submission, index); ends come first among simultaneous events
    events: list[tuple[float, int, int]] = [(job.submit, 1, index) for index, job in enumerate(jobs)]
    heapq.heapify(events)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, submission, index = heapq.heappop(events)
            if submission:
                scheduler.submit(Job(str(index), jobs[index].nodes, jobs[index].walltime))
            else:
                scheduler.ended(str(index))
        for action in scheduler.schedule(now):
            index = int(action.job.id)
            starts[index] = now
            heapq.heappush(events, (now + jobs[index].run, 0, index))
    return starts
