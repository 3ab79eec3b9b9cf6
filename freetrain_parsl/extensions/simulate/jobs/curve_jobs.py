"""Workloads without profiles: jobs whose throughput is a curve over GPUs, from a list of trainers or a job log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.goodput.curve import BatchLimits
from freetrain_parsl.extensions.replay.logs.logs import read_jobs
from freetrain_parsl.extensions.replay.trainer_files import MODELS, read_trainers
from freetrain_parsl.extensions.simulate.application import Application, Efficiency
from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from freetrain_parsl.extensions.replay.logs.job_log import RecordedJob
    from freetrain_parsl.extensions.simulate.jobs.step_times import Placement
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import PlannedJob

__all__ = ["curve_request", "read_job_log", "read_trainer_workload"]

_EPOCHS = 10  # of a job: Optimus counts the work left by epochs


@dataclass(frozen=True)
class CurveTimes:
    """Times of a step of `batch` samples that follow from a curve: the same for each placement of a number of GPUs."""

    curve: ScalingCurve
    batch: int

    def __call__(self, placement: Placement, local_batch: int) -> tuple[float, float]:  # noqa: ARG002 - one batch
        """Return the seconds of a step; all of it is the exchange, so that the number of passes is of no effect."""
        seconds = self.batch / self.curve(sum(placement))
        return seconds, seconds

    def table(self, placement: Placement, local_batch: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Tabulate the two times, shape (2, batches)."""
        return np.full((2, len(local_batch)), self(placement, 0)[0])


def read_trainer_workload(file: Path, gpus: int) -> tuple[JobRequest, ...]:
    """Read a list of trainers as jobs; see `freetrain_parsl.extensions.replay.trainer_files.read_trainers`.

    Each is submitted at ``submit``, ends after its ``work``, runs on ``min`` to ``max`` GPUs, and loses the seconds of
    ``rescale`` at a change. Policies that choose nothing give it ``max``.

    Raises
    ------
    InvalidInput
        The file is invalid, or a job never ends or needs more GPUs than there are; the message contains the line.
    """

    def problem(trainer: PlannedJob) -> str | None:
        if not 0 < trainer.work_left < math.inf:
            return "a job needs 'work', a positive number of samples: without, it never ends"
        if trainer.curves:
            return "a job has one curve; give it without kinds of nodes"
        if trainer.max_nodes > gpus:
            return f"max is {trainer.max_nodes} GPUs, the cluster has {gpus}"
        if any(trainer.rate(count) <= 0 for count in range(trainer.min_nodes, trainer.max_nodes + 1)):
            return "its curve is zero at an allowed number of GPUs, where the job would never end"
        return None

    jobs = [
        curve_request(trainer, trainer.name, trainer.submitted, trainer.max_nodes, trainer.work_left)
        for trainer in read_trainers(file, MODELS, problem)
    ]
    return tuple(sorted(jobs, key=lambda job: job.time))


def read_job_log(
    file: Path, trainers: Sequence[PlannedJob], gpus: int, *, lenient: bool = False
) -> tuple[JobRequest, ...]:
    """Read a job log, the output of ``sacct`` or in Standard Workload Format, as jobs that could be rescaled.

    A node of the log is a GPU of the cluster. A job is submitted when the log says so, asks for the nodes that it had,
    and has as much work as it would have done on them in its recorded run time, with the curve of a trainer. Trainers
    are used in turn. Jobs that did not run, or whose end the log does not contain, are left out.

    Raises
    ------
    InvalidInput
        The log is invalid, contains no jobs, or one that needs more GPUs than there are.
    """
    turns = cycle(trainers)
    jobs = [
        _recorded_request(next(turns), job, number, gpus)
        for number, job in enumerate(sorted(read_jobs(file, lenient=lenient), key=lambda job: job.submit))
        if job.start is not None and job.start < job.end < math.inf
    ]
    if not jobs:
        raise InvalidInput(f"{file}: contains no job that ran and ended")
    first = jobs[0].time
    return tuple(
        JobRequest(job.name, job.time - first, job.application, job.gpus, job.batch, job.least, job.costs)
        for job in jobs
    )


def _recorded_request(trainer: PlannedJob, job: RecordedJob, number: int, gpus: int) -> JobRequest:
    if job.nodes > gpus:
        raise InvalidInput(f"{job.where}: the job had {job.nodes} nodes, the cluster has {gpus} GPUs")
    least, most = min(trainer.min_nodes, job.nodes), min(max(trainer.max_nodes, job.nodes), gpus)
    rate = trainer.rate(max(job.nodes, trainer.curve.first_nodes))
    if rate <= 0:
        raise InvalidInput(f"{job.where}: the curve of trainer {trainer.name!r} is zero on its {job.nodes} nodes")
    return curve_request(trainer, f"job-{number}", job.submit, job.nodes, rate * (job.end - job.began), (least, most))


def curve_request(
    trainer: PlannedJob, name: str, submitted: float, gpus: int, work: float, bounds: tuple[int, int] | None = None
) -> JobRequest:
    """Make a job that trains with a trainer's curve, all steps of the same batch, until its work in samples is done.

    Policies that choose nothing give it `gpus`; `bounds`, of the trainer by default, are its fewest and most.
    """
    least, most = bounds or (trainer.min_nodes, trainer.max_nodes)
    curve = trainer.curve
    if curve.first_nodes > least:
        least = min(curve.first_nodes, gpus)
    steps = (work / most * np.arange(1, _EPOCHS + 1) / _EPOCHS)[:, None]
    ones = np.ones_like(steps)
    application = Application(
        trainer.name,
        _EPOCHS,
        BatchLimits(most, most, 1, max(most - 1, 1)),
        CurveTimes(curve, most),
        Efficiency(np.array([float(most)]), steps, steps, ones, 0 * ones),
    )
    return JobRequest(name, submitted, application, gpus, most, least, trainer.costs)
