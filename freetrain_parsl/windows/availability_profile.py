"""The availability profile: which nodes are free, and until when, according to the batch system's own plan.

A node closes when the first of these begins: another user's job that is planned on it, or a reservation that contains
it. The pending jobs are processed in the scheduler's order; where the plan is incomplete, the worst case is assumed
and noted:

- An eligible job without a planned start has not been considered yet (or does not fit). If enough suitable nodes are
  free now for its whole walltime, taking into account the jobs before it in the queue, it is assumed to start now;
  otherwise, as soon as enough nodes would be free if all other jobs left theirs to it. In both cases it takes the nodes
  that are free longest, since those are the ones that it can use, and its full number of nodes.
- A job with a planned start but without planned nodes takes the suitable nodes that are free longest.
- The scheduler considers only `Scheduling.plan_jobs` jobs; a job deeper in the queue does not start before it has
  moved up, and is ignored.
- A job that is not eligible (held, waiting for another) is considered only if it has a planned start.

In a preemptible partition, jobs of a higher tier take nodes at any time, so unplanned ones do not close windows.

If other users' jobs are hidden, there is no such plan: see `windows.hidden_queue`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.planning.model import Window, WindowKind
from freetrain_parsl.windows.hidden_queue import HiddenQueue
from freetrain_parsl.windows.hostlist import natural_order
from freetrain_parsl.windows.occupancy import Occupancy
from freetrain_parsl.windows.yield_requests import find_claims

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from freetrain_parsl.windows.state import BatchState, Node, Partition, PendingJob

__all__ = ["NodeNeeds", "Staircase", "find_windows", "gpus_of"]

_NAMED_IN_NOTE = 5


@dataclass(frozen=True)
class NodeNeeds:
    """What a block requires of each of its nodes; memory in MiB."""

    partition: str
    exclusive: bool = True
    """It takes whole nodes: only idle ones count. Otherwise partly used nodes with enough resources count too."""
    cpus: int = 1
    gpus: int = 0
    memory: int = 0
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Staircase:
    """The result of `find_windows`.

    Parameters
    ----------
    windows
        Groups of nodes that close at the same time, largest first.
    wanted
        Nodes that our jobs hold -> when another user's job would start there if we were gone, seconds. Empty in a
        preemptible partition, where the batch system preempts.
    notes
        Assumptions where the plan is incomplete, one line each.
    unused
        Node of the partition that is in no window -> why, in plain English.
    suitable
        Number of nodes of the partition that have what a block requires, in use or not; those that are down count.
    """

    windows: tuple[Window, ...] = ()
    wanted: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unused: dict[str, str] = field(default_factory=dict)
    suitable: int = 0


def find_windows(state: BatchState, needs: NodeNeeds, ours: Collection[str] = ()) -> Staircase:
    """Find the windows for blocks that require `needs` of each node.

    Parameters
    ----------
    state
        State of the batch system.
    needs
        What a block requires of each node.
    ours
        Ids of our own jobs: pending ones are ignored, and nodes of running ones are not free.

    Raises
    ------
    InvalidSettings
        The partition does not exist.
    """
    partition = state.partitions.get(needs.partition)
    if partition is None:
        hint = did_you_mean(needs.partition, state.partitions)
        raise InvalidSettings(f"the batch system has no partition or queue {needs.partition!r}{hint}")
    suitable = sum(_may_suit(state.nodes.get(name), needs) for name in partition.nodes)
    if not partition.up:
        why = f"partition {partition.name} is down: jobs in it do not start"
        return Staircase(notes=(why,), unused=dict.fromkeys(partition.nodes, why), suitable=suitable)
    occupancy = Occupancy(state, ours)
    closings = _Closings(occupancy, partition)
    hidden = HiddenQueue(occupancy, partition) if state.hides_jobs else None
    withheld = {} if hidden is None else hidden.unused
    unused: dict[str, str] = {}
    groups: defaultdict[float, list[Node]] = defaultdict(list)
    for name in partition.nodes:
        node = state.nodes.get(name)
        why = "not reported by the batch system" if node is None else _why_not(node, needs, occupancy)
        if node is None or why:
            unused[name] = why
        elif name in withheld:
            unused[name] = withheld[name]
        elif closings.closes[name] <= state.time:
            unused[name] = closings.why[name]
        else:
            groups[closings.closes[name]].append(node)
    kind = WindowKind.PREEMPTIBLE if partition.preemptible else WindowKind.BACKFILL
    windows = [
        Window(
            tuple(node.name for node in nodes),
            max(state.time if node.idle_since is None else min(node.idle_since, state.time) for node in nodes),
            None if math.isinf(closes) else closes,
            kind,
            partition.name,
        )
        for closes, nodes in groups.items()
    ]
    windows.sort(key=lambda window: (-len(window.nodes), natural_order(window.nodes[0])))
    wanted = {} if partition.preemptible else find_claims(occupancy)
    notes = closings.notes
    if hidden is not None:
        wanted, notes = {**wanted, **hidden.wanted}, [*hidden.notes, *notes]
    return Staircase(tuple(windows), wanted, tuple(notes), unused, suitable)


class _Closings:
    """When each free node closes, and why; built in one pass through the queue."""

    def __init__(self, occupancy: Occupancy, partition: Partition) -> None:
        self.notes: list[str] = []
        self.why: dict[str, str] = {}
        self._occupancy = occupancy
        state = occupancy.state
        self.closes = {name: occupancy.next_reservation(name) for name in state.nodes}
        self._free: dict[tuple[str, frozenset[str]], list[str]] = {}
        self._ends: dict[tuple[str, frozenset[str]], list[float]] = {}
        remarks: defaultdict[str, list[str]] = defaultdict(list)
        for job in occupancy.queue:
            if job.start is not None:
                remark = self._planned(job, job.start)
            elif not job.eligible or (partition.preemptible and self._preempts(job, partition)):
                continue
            elif job.job in occupancy.out_of_reach:
                remark = (
                    f"deeper in the queue than the {state.scheduling.plan_jobs} jobs that the scheduler plans: "
                    f"not expected to start soon"
                )
            else:
                remark = self._unplanned(job)
            if remark:
                remarks[remark].append(job.job)
        self.notes += [f"{_jobs(list(dict.fromkeys(jobs)))}: {remark}" for remark, jobs in remarks.items()]

    def _preempts(self, job: PendingJob, partition: Partition) -> bool:
        partitions = self._occupancy.state.partitions
        return any(partitions[name].tier > partition.tier for name in self._occupancy.partitions_of(job))

    def _planned(self, job: PendingJob, start: float) -> str:
        if job.planned_nodes:
            self._close(job.planned_nodes, start, job)
            return ""
        longest = sorted(self._free_for(job), key=self.closes.__getitem__, reverse=True)
        self._close([*job.named_nodes, *longest][: job.node_count], start, job)
        return "planned start without planned nodes: assumed to take the nodes that are free longest"

    def _unplanned(self, job: PendingJob) -> str:
        """Close the nodes that a job without a plan may take."""
        now = self._occupancy.now
        if job.named_nodes:
            start = max(map(self._occupancy.free_from, job.named_nodes))
            suitable = set(self._occupancy.suitable(job))
            if not suitable.issuperset(job.named_nodes):
                return ""  # it waits for an unavailable node
            nodes = list(job.named_nodes)
        else:
            fitting = [name for name in self._free_for(job) if self.closes[name] >= now + job.walltime]
            start = now
            missing = job.node_count - len(fitting)
            if missing > 0:
                ends = self._ends[job.partition, job.features]
                if missing > len(ends):
                    return ""  # the jobs before it take the nodes that it needs
                start = ends[missing - 1]
                fitting = [name for name in fitting if self.closes[name] >= start + job.walltime]
            nodes = sorted(fitting, key=self.closes.__getitem__, reverse=True)[: job.node_count]
        if not any(start < self.closes.get(name, -math.inf) for name in nodes):
            return ""  # it does not affect our windows
        self._close(nodes, start, job)
        when = "at once" if start <= now else "as soon as enough nodes are free"
        return f"eligible without a planned start: assumed to start {when}, on the nodes that are free longest"

    def _free_for(self, job: PendingJob) -> list[str]:
        """List the nodes that suit a job and are free now, except those on which jobs before it start."""
        key = (job.partition, job.features)
        occupancy = self._occupancy
        if key not in self._free:
            nodes = occupancy.state.nodes
            names = occupancy.suitable(job)
            self._free[key] = [name for name in names if occupancy.is_free(nodes[name])]
            free = set(self._free[key])
            tier = occupancy.tier_of(job)
            self._ends[key] = sorted(occupancy.free_from(name, tier) for name in names if name not in free)
        self._free[key] = [name for name in self._free[key] if self.closes[name] > occupancy.now]
        return self._free[key]

    def _close(self, nodes: Iterable[str], start: float, job: PendingJob) -> None:
        for name in nodes:
            if start < self.closes.get(name, -math.inf):
                self.closes[name] = start
                self.why[name] = f"job {job.job} of {job.user} is about to start on it"


def _jobs(jobs: list[str]) -> str:
    if len(jobs) == 1:
        return f"job {jobs[0]}"
    named = ", ".join(jobs[:_NAMED_IN_NOTE])
    return f"{len(jobs)} jobs ({named}{', …' if len(jobs) > _NAMED_IN_NOTE else ''})"


def _why_not(node: Node, needs: NodeNeeds, occupancy: Occupancy) -> str:
    """Explain why no block can start on a node now, whatever is planned there; empty if one can."""
    if node.unusable:
        return node.unusable
    reservation = occupancy.in_force(node.name)
    if reservation is not None:
        return f"in reservation {reservation.name} until {_clock(reservation.end, occupancy.now)}"
    if unsuitable := _why_unsuitable(node, needs):
        return unsuitable
    jobs = occupancy.jobs_on.get(node.name, ())
    for job in jobs:
        if job.job in occupancy.ours:
            return f"runs our job {job.job}"
    if not needs.exclusive:
        return _lacks(node, needs)
    if jobs:
        until = "" if jobs[0].ends is None else f" until {_clock(jobs[0].ends, occupancy.now)}"
        return f"runs job {jobs[0].job} of {jobs[0].user}{until}"
    return "" if node.idle else "busy with a job that is not visible"


def _may_suit(node: Node | None, needs: NodeNeeds) -> bool:
    """Return whether blocks can ever start on a node, as far as known; one that is down may not state what it has."""
    return node is None or bool(node.unusable) or not _why_unsuitable(node, needs)


def gpus_of(nodes: Iterable[Node], needs: NodeNeeds) -> frozenset[int]:
    """Return the numbers of GPUs of the nodes on which blocks can start."""
    return frozenset(node.gpus for node in nodes if not node.unusable and not _why_unsuitable(node, needs))


def _why_unsuitable(node: Node, needs: NodeNeeds) -> str:
    """Explain what a block requires that a node does not have, even if it is free; empty if nothing."""
    missing = needs.features - node.features
    if missing:
        return f"does not have feature {', '.join(sorted(missing))}"
    for what, asked, has in (
        ("CPUs", needs.cpus, node.cpus),
        ("GPUs", needs.gpus, node.gpus),
        ("MiB of memory", needs.memory, node.memory),
    ):
        if asked > has:
            return f"has {has} {what}, {asked} required"
    return ""


def _lacks(node: Node, needs: NodeNeeds) -> str:
    for what, asked, free, has in (
        ("CPUs", needs.cpus, node.cpus_free, node.cpus),
        ("GPUs", needs.gpus, node.gpus_free, node.gpus),
        ("MiB of memory", needs.memory, node.memory_free, node.memory),
    ):
        if asked > free:
            return f"only {free} of {has} {what} free"
    return ""


def _clock(when: float, now: float) -> str:
    """Format a time of day, with the date if it is not within a day."""
    return time.strftime("%H:%M" if abs(when - now) < 86400 else "%Y-%m-%d %H:%M", time.localtime(when))
