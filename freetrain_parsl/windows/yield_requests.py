"""Yield requests: which of the nodes held by our jobs another user's job is waiting for, so that we leave them.

The pending jobs of other users are processed in the scheduler's order, as if our running jobs were gone:

- A job that would start now gets free nodes first, then those of jobs that yield to it, then ours: these are requested
  now.
- A job that would not, but is planned on some of our nodes, is delayed by us only if the other nodes of its plan are
  free before its planned start; ours are then requested from that time.
- Jobs do not overtake: nodes of a job that must wait may be used by later jobs only until its start (EASY).

Last, nodes of ours on which jobs would start now are exchanged for free ones that were only kept for waiting jobs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING

from freetrain_parsl.windows.base import OUR_JOBS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.windows.occupancy import Occupancy
    from freetrain_parsl.windows.state import PendingJob

__all__ = ["find_claims"]


def find_claims(occupancy: Occupancy) -> dict[str, float]:
    """Find the nodes of our running jobs for which other jobs wait: node -> when the job would start there, seconds.

    Other users' FreeTrain jobs are ignored: they use idle nodes as ours do, and yielding to each other would stop both.
    """
    walk = _Walk(occupancy)
    if walk.mine:
        for job in occupancy.queue:
            if job.job not in occupancy.out_of_reach and not job.name.startswith(OUR_JOBS):
                walk.visit(job)
        walk.spare_ours()
    return walk.wanted


class _Walk:
    def __init__(self, occupancy: Occupancy) -> None:
        self.wanted: dict[str, float] = {}
        self._occupancy = occupancy
        self._now = occupancy.now
        nodes = occupancy.state.nodes
        self._free = {name for name, node in nodes.items() if occupancy.is_free(node)}
        self.mine = {
            name
            for name, jobs in occupancy.jobs_on.items()
            if all(job.job in occupancy.ours for job in jobs)
            and name in nodes
            and not nodes[name].unusable
            and occupancy.in_force(name) is None
        }
        self._taken_until: dict[str, float] = {}
        self._started: dict[str, PendingJob] = {}  # node -> the job that would start there now
        self._kept_for: dict[str, list[PendingJob]] = {}
        self._lasts = {name: occupancy.next_reservation(name) for name in nodes}
        self._usable: dict[tuple[str, frozenset[str]], list[str]] = {}
        self._ends: dict[tuple[str, frozenset[str]], list[float]] = {}

    def visit(self, job: PendingJob) -> None:
        """Let a job start now, or reserve nodes for its start."""
        if job.eligible and self._starts_now(job):
            return
        if job.start is None:
            if job.eligible:
                self._keep_earliest(job)
            return
        if job.planned_nodes:
            self._keep_planned(job, job.start)
        else:
            self._keep(job, sorted(self._usable_by(job), key=self._lasts.__getitem__)[-job.node_count :], job.start)

    def _usable_by(self, job: PendingJob) -> list[str]:
        """List the suitable nodes that are free, ours or yield to a job, and are not taken by jobs before it."""
        key = (job.partition, job.features)
        if key not in self._usable:
            tier = self._occupancy.tier_of(job)
            self._usable[key] = [
                name
                for name in self._occupancy.suitable(job)
                if name in self._free or name in self.mine or self._occupancy.can_be_preempted(name, tier)
            ]
        self._usable[key] = [name for name in self._usable[key] if name not in self._taken_until]
        return self._usable[key]

    def _starts_now(self, job: PendingJob) -> bool:
        end = self._now + job.walltime
        usable = [name for name in self._usable_by(job) if self._lasts[name] >= end]
        if len(usable) < job.node_count or not set(usable).issuperset(job.named_nodes):
            return False
        named = set(job.named_nodes)
        planned = set(job.planned_nodes)
        # Nodes that are kept for a job before it come first if it ends in time: later jobs may not.
        usable.sort(
            key=lambda name: (
                name not in named,
                self._lasts[name],
                name not in self._free,
                name in self.mine,
                name not in planned,
            )
        )
        for name in usable[: job.node_count]:
            self._taken_until[name] = end
            self._started[name] = job
            if name in self.mine:
                self.wanted[name] = self._now
        return True

    def _keep_planned(self, job: PendingJob, start: float) -> None:
        others = [name for name in job.planned_nodes if name not in self.mine]
        tier = self._occupancy.tier_of(job)
        without_us = max((self._free_from(name, tier) for name in others), default=self._now)
        ours = self.mine.intersection(job.planned_nodes)
        if job.eligible and ours and without_us < start:
            for name in ours:
                self.wanted[name] = min(without_us, self.wanted.get(name, math.inf))
            start = without_us
        self._keep(job, job.planned_nodes, start)

    def _keep_earliest(self, job: PendingJob) -> None:
        """Reserve nodes for a job without a plan, from the first time at which there are enough.

        It gets those that become free last, so that later jobs can use the others.
        """
        usable = self._usable_by(job)
        missing = job.node_count - len(usable)
        if missing <= 0:
            return  # there are enough; it only waits for the jobs before it
        key = (job.partition, job.features)
        if key not in self._ends:
            tier = self._occupancy.tier_of(job)
            busy = (
                name
                for name in self._occupancy.suitable(job)
                if name not in self._free and name not in self.mine and not self._occupancy.can_be_preempted(name, tier)
            )
            self._ends[key] = sorted(self._occupancy.free_from(name, tier) for name in busy)
        suitable = self._occupancy.suitable(job)
        taken = sorted(end for name, end in self._taken_until.items() if name in suitable)
        start = next(islice(heapq.merge(self._ends[key], taken), missing - 1, None), math.inf)
        if math.isfinite(start):
            in_time = bisect_right(self._ends[key], start) + bisect_right(taken, start)
            usable = sorted(usable, key=self._lasts.__getitem__)  # those that are kept for others already come first
            self._keep(job, usable[: max(0, job.node_count - in_time)], start)

    def _free_from(self, name: str, tier: float) -> float:
        return self._taken_until.get(name, self._occupancy.free_from(name, tier))

    def spare_ours(self) -> None:
        """Exchange nodes of ours on which jobs would start now for others that are only kept for waiting jobs."""
        spare = [name for names in (self._free, self._yielding()) for name in sorted(names - self._started.keys())]
        for name in sorted(self.mine & self._started.keys()):
            job = self._started[name]
            if name in job.named_nodes:
                continue
            tier = self._occupancy.tier_of(job)
            for other in spare:
                if (
                    other in self._occupancy.suitable(job)
                    and (other in self._free or self._occupancy.can_be_preempted(other, tier))
                    and self._occupancy.next_reservation(other) >= self._taken_until[name]
                    and all(
                        other not in waiting.planned_nodes and name in self._occupancy.suitable(waiting)
                        for waiting in self._kept_for.get(other, ())
                    )
                ):
                    spare.remove(other)
                    self._started[other] = self._started.pop(name)
                    del self.wanted[name]
                    break

    def _yielding(self) -> set[str]:
        """Return the nodes whose jobs yield to one that would start now."""
        tiers = {self._occupancy.tier_of(job) for job in self._started.values()}
        nodes = self._occupancy.state.nodes.keys() - self._free - self.mine
        return {name for name in nodes if any(self._occupancy.can_be_preempted(name, tier) for tier in tiers)}

    def _keep(self, job: PendingJob, names: Iterable[str], start: float) -> None:
        for name in names:
            self._kept_for.setdefault(name, []).append(job)
            if start < self._lasts.get(name, -math.inf):
                self._lasts[name] = start
