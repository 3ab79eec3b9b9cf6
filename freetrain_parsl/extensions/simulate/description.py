"""What a policy knows of a job: the job as a trainer of the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.goodput.curve import GoodputProfile
from freetrain_parsl.extensions.simulate.jobs.job import SimulatedJob
from freetrain_parsl.extensions.simulate.jobs.step_times import packed
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, EpochCount, PlannedJob, PoolNode

if TYPE_CHECKING:
    from freetrain_parsl.extensions.simulate.application import Application
    from freetrain_parsl.extensions.simulate.jobs.step_times import Placement
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest

__all__ = ["ClusterShape", "JobDescription", "PlacedGoodput", "Sizing"]


@dataclass(frozen=True)
class ClusterShape:
    """The cluster: its nodes, and the GPUs of each."""

    nodes: int
    gpus_per_node: int

    @classmethod
    def parse(cls, text: str) -> ClusterShape:
        """Read ``NODESxGPUS``, as in ``16x4``.

        Raises
        ------
        InvalidSettings
            It is not of this form.
        """
        nodes, cross, gpus = text.partition("x")
        if not (cross and nodes.isdecimal() and gpus.isdecimal() and int(nodes) and int(gpus)):
            raise InvalidSettings(f"a cluster is NODESxGPUS, as in 16x4, got {text!r}")
        return cls(int(nodes), int(gpus))

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return self.nodes * self.gpus_per_node

    def slots(self) -> tuple[PoolNode, ...]:
        """Return the GPUs as the planner sees them: they never close, and machines are their hosts."""
        width = len(str(self.nodes - 1))
        hosts = [f"n{node:0{width}d}" for node in range(self.nodes)]
        return tuple(
            PoolNode(f"{host}/{gpu}", closes=math.inf, host=host) for host in hosts for gpu in range(self.gpus_per_node)
        )


class Sizing(str, Enum):
    """What a policy may choose."""

    RIGID = "rigid"
    """Nothing: a job has the GPUs and the batch that its user asked for."""
    GPUS = "gpus"
    """The GPUs; the batch is the requested one."""
    BOTH = "both"
    """The GPUs, and for each number of these the best batch."""


@dataclass(frozen=True)
class JobDescription:
    """Describes jobs as trainers, whose nodes are GPUs.

    Parameters
    ----------
    cluster
        Its GPUs per node determine which placements are expected.
    sizing
        What may be chosen.
    work_known
        Whether the work left is known.
    curves_known
        Whether the curves of jobs whose batches are chosen are known; otherwise they are measured while jobs run, and a
        job may have at most twice the GPUs that it has been measured on.
    placements_known
        Whether the goodput on each placement is known, not only that on the fewest nodes.
    epochs_known
        Whether the epochs done and left are known.
    deadline_factor
        A job's deadline after its submission, as a multiple of the time that it takes as requested; ``None`` for none.
    most_requested
        A job may have at most this times the GPUs that its user asks for; ``None`` for no limit.
    """

    cluster: ClusterShape
    sizing: Sizing
    work_known: bool
    curves_known: bool = True
    placements_known: bool = False
    epochs_known: bool = False
    deadline_factor: float | None = None
    most_requested: int | None = None

    @property
    def elastic_batch(self) -> bool:
        """Whether batches are chosen."""
        return self.sizing is Sizing.BOTH

    def job(self, request: JobRequest) -> SimulatedJob:
        """Make a job of a request."""
        profile = GoodputProfile() if self.elastic_batch and not self.curves_known else None
        return SimulatedJob(request, self.elastic_batch, profile)

    def trainer(self, job: SimulatedJob) -> PlannedJob:
        """Return the job as it is known now."""
        request, application = job.request, job.request.application
        placed, least = None, request.least
        if self.sizing is Sizing.BOTH:
            most = min(application.max_gpus, self.cluster.gpus)
            if self.most_requested is not None:
                most = min(most, self.most_requested * request.gpus)
            work = job.progress_left * application.limits.initial
            costs = request.costs
            if job.profile is None:
                curve = _goodput(
                    application, job.epoch, (least, most), self.cluster.gpus_per_node, every=self.placements_known
                )
                placed = PlacedGoodput(application, job.epoch) if self.placements_known else None
            elif job.profile.most_nodes:
                most = min(most, 2 * job.profile.most_nodes)
                curve = _learned(job, job.profile, most, self.cluster.gpus_per_node)
            else:
                most, work, curve = 1, math.inf, ScalingCurve.to_be_learned()
        else:
            most = request.gpus
            if self.sizing is Sizing.GPUS:
                most = min(request.batch // application.limits.least_local, application.max_gpus, self.cluster.gpus)
            curve = _throughput(application, request.batch, (least, max(most, least)), self.cluster.gpus_per_node)
            work = request.batch * application.iterations_after(job.epoch, request.batch)
            costs = CostsInSeconds()
        return PlannedJob(
            job.name,
            request.gpus if self.sizing is Sizing.RIGID else min(least, max(most, 1)),
            max(most, 1),
            curve,
            costs,
            work_left=work if self.work_known else math.inf,
            deadline=None if self.deadline_factor is None else self._deadline(request),
            submitted=request.time,
            placed=placed,
            epochs=_epochs(job) if self.epochs_known else None,
        )

    def _deadline(self, request: JobRequest) -> float:
        assert self.deadline_factor is not None, "called for policies that know deadlines"
        placement = packed(request.gpus, self.cluster.gpus_per_node)
        return request.time + self.deadline_factor * request.application.seconds(placement, request.batch)


@dataclass(frozen=True)
class PlacedGoodput:
    """The samples of the initial batch per second of a job in some epoch, by its GPUs on each node."""

    application: Application
    epoch: int

    def __call__(self, placement: Placement) -> float:
        """Return the rate with the best batch."""
        return self.application.limits.initial * self.application.best(placement, self.epoch)[1]


def _epochs(job: SimulatedJob) -> EpochCount:
    epochs = job.request.application.epochs
    return EpochCount(job.epoch, epochs - job.epoch, job.progress * job.request.application.limits.initial)


@lru_cache(maxsize=4096)
def _throughput(application: Application, batch: int, bounds: tuple[int, int], gpus_per_node: int) -> ScalingCurve:
    """Return samples per second of a fixed batch on the fewest nodes."""
    return ScalingCurve(
        (gpus, batch / application.step_seconds(packed(gpus, gpus_per_node), application.limits.plan(batch, gpus)))
        for gpus in range(bounds[0], bounds[1] + 1)
    )


@lru_cache(maxsize=4096)
def _goodput(
    application: Application, epoch: int, bounds: tuple[int, int], gpus_per_node: int, *, every: bool
) -> ScalingCurve:
    """Return the samples of the initial batch per second, with the best batch, on the fewest nodes.

    Known at `every` number of GPUs, or at those of one node and of whole nodes.
    """
    rate = PlacedGoodput(application, epoch)
    least, most = bounds
    counts = range(1, most + 1) if every else _counts(most, gpus_per_node)
    return ScalingCurve((gpus, rate(packed(gpus, gpus_per_node))) for gpus in sorted({least, *counts}) if gpus >= least)


def _learned(job: SimulatedJob, profile: GoodputProfile, most: int, gpus_per_node: int) -> ScalingCurve:
    """Return the same, as far as has been measured."""
    limits, noise = job.request.application.limits, job.noise
    return ScalingCurve(
        (gpus, limits.initial * profile.best(limits, gpus, len(packed(gpus, gpus_per_node)), noise)[1])
        for gpus in _counts(most, gpus_per_node)
    )


def _counts(most: int, gpus_per_node: int) -> list[int]:
    """List the numbers of GPUs that are part of a node, or whole nodes."""
    return sorted({*range(1, min(most, gpus_per_node) + 1), *range(gpus_per_node, most + 1, gpus_per_node)})
