"""Which jobs hold which nodes until when, and which nodes a pending job may use; common to windows and claims."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from freetrain_parsl.windows.state import BatchState, Node, PendingJob, Reservation, RunningJob

__all__ = ["Occupancy"]


class Occupancy:
    """A batch system's state, indexed by node.

    `ours` are the ids of our own jobs; pending ones are ignored.
    """

    def __init__(self, state: BatchState, ours: Collection[str]) -> None:
        self.state = state
        self.now = state.time
        self.ours = frozenset(ours)
        self.jobs_on: defaultdict[str, list[RunningJob]] = defaultdict(list)
        for running in state.running:
            for name in running.nodes:
                self.jobs_on[name].append(running)
        self.reserved: defaultdict[str, list[Reservation]] = defaultdict(list)
        for reservation in state.reservations:
            if reservation.end > self.now:
                for name in reservation.nodes:
                    self.reserved[name].append(reservation)
        self.queue = sorted((job for job in state.pending if job.job not in self.ours), key=self._order)
        self.out_of_reach = self._out_of_reach()
        self._suitable: dict[tuple[str, frozenset[str]], dict[str, None]] = {}

    def _order(self, job: PendingJob) -> tuple[float, float, int, str]:
        """Return the scheduler's sort key: tier of the partition, priority, then first come, first served."""
        return (-self.tier_of(job), -job.priority, len(job.job), job.job)

    def tier_of(self, job: PendingJob) -> float:
        """Return the highest tier of the partitions in which a job is pending."""
        return max((self.state.partitions[name].tier for name in self.partitions_of(job)), default=0.0)

    def _out_of_reach(self) -> frozenset[str]:
        """Return the jobs without a plan that are deeper in the queue than the scheduler considers."""
        most = self.state.scheduling.plan_jobs
        eligible = list({job.job: job for job in self.queue if job.eligible}.values())  # tasks of an array are one
        return frozenset() if most is None else frozenset(job.job for job in eligible[most:] if job.start is None)

    def partitions_of(self, job: PendingJob) -> list[str]:
        """Return the known partitions in which a job is pending; Slurm separates several by commas."""
        return [name for name in job.partition.split(",") if name in self.state.partitions]

    def suitable(self, job: PendingJob) -> Collection[str]:
        """Return the nodes on which a job could run once free: in its partitions, usable, with its features."""
        key = (job.partition, job.features)
        if key not in self._suitable:
            names = dict.fromkeys(
                name
                for partition in self.partitions_of(job)
                if self.state.partitions[partition].up
                for name in self.state.partitions[partition].nodes
            )
            nodes = self.state.nodes
            self._suitable[key] = dict.fromkeys(
                name
                for name in names
                if name in nodes and not nodes[name].unusable and job.features <= nodes[name].features
            )
        return self._suitable[key]

    def in_force(self, name: str) -> Reservation | None:
        """Return the active reservation of a node, if any."""
        return next((item for item in self.reserved.get(name, ()) if item.start <= self.now), None)

    def next_reservation(self, name: str) -> float:
        """Return when the next reservation of a node begins, now if it has begun; infinity for none."""
        return min((max(self.now, item.start) for item in self.reserved.get(name, ())), default=math.inf)

    def is_free(self, node: Node) -> bool:
        """Return whether a job could start on the whole node now, regardless of plans."""
        return node.idle and not node.unusable and not self.jobs_on.get(node.name) and self.in_force(node.name) is None

    def free_from(self, name: str, tier: float = -math.inf) -> float:
        """Return the latest end of an active reservation and of the jobs on a node that do not yield to `tier`.

        Now if none is visible, even if the node is busy.
        """
        jobs = (job for job in self.jobs_on.get(name, ()) if not self._yields(job, tier))
        ends = [math.inf if job.ends is None else job.ends for job in jobs]
        reservation = self.in_force(name)
        return max(self.now, *ends, self.now if reservation is None else reservation.end)

    def can_be_preempted(self, name: str, tier: float) -> bool:
        """Return whether there are jobs on a node and all of them yield to a job of this tier."""
        jobs = self.jobs_on.get(name, ())
        return bool(jobs) and self.in_force(name) is None and all(self._yields(job, tier) for job in jobs)

    def _yields(self, job: RunningJob, tier: float) -> bool:
        partition = self.state.partitions.get(job.partition)
        return partition is not None and partition.preemptible and partition.tier < tier
