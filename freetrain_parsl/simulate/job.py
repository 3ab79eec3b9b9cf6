"""A job in the simulated cluster: its progress on the GPUs that it has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from freetrain_parsl.simulate.application import BatchPlan
    from freetrain_parsl.simulate.step_times import Placement
    from freetrain_parsl.simulate.workload import JobRequest

__all__ = ["Phase", "SimulatedJob"]


class Phase(NamedTuple):
    """A stretch of a job's life: from `time` on it has these GPUs, this batch and this speed (zero if it waits)."""

    time: float
    gpus: int
    batch: int
    speed: float


@dataclass
class SimulatedJob:
    """State of a submitted job.

    Parameters
    ----------
    request
        What its user asked for.
    elastic_batch
        Whether the batch is chosen for the GPUs that it has; otherwise it is the requested one.
    """

    request: JobRequest
    elastic_batch: bool
    slots: frozenset[str] = frozenset()
    placement: Placement = ()
    epoch: int = 0
    progress: float = 0.0
    done_at: float | None = None
    restarts: int = -1  # the first start is none
    standing: float = 0.0
    training_seconds: float = 0.0
    restart_seconds: float = 0.0
    phases: list[Phase] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The job's name."""
        return self.request.name

    @property
    def jct(self) -> float:
        """Seconds from submission to completion."""
        assert self.done_at is not None, "called for jobs that are done"
        return self.done_at - self.request.time

    def move(self, slots: frozenset[str], placement: Placement, now: float, pause: float) -> None:
        """Continue on other slots, after a pause; without slots, wait."""
        self.slots, self.placement = slots, placement
        if slots:
            self.restarts += 1
            self.standing = pause
        self._note(now)

    def advance(self, now: float, seconds: float) -> None:
        """Pass time: stand still for the rest of the pause, then train, epoch by epoch.

        The end of an epoch is rounded to whole seconds, as in Pollux' simulator.
        """
        if not self.placement:
            return
        gpus = sum(self.placement)
        pause = min(self.standing, seconds)
        self.standing -= pause
        self.restart_seconds += pause * gpus
        now, seconds = now + pause, seconds - pause
        application = self.request.application
        while seconds > 0:
            speed = application.speed(self.placement, self.plan, self.epoch)
            goal = float(application.milestones[self.epoch + 1])
            if self.progress + speed * seconds < goal:
                self.progress += speed * seconds
                self.training_seconds += seconds * gpus
                return
            taken = min(round((goal - self.progress) / speed), seconds)
            self.progress = goal
            self.epoch += 1
            self.training_seconds += taken * gpus
            now, seconds = now + taken, seconds - taken
            if self.epoch == application.epochs:
                self.done_at = now
                return
            self._note(now)

    @property
    def plan(self) -> BatchPlan:
        """How its batch is computed now; the job has GPUs."""
        application = self.request.application
        if self.elastic_batch:
            return application.best(self.placement, self.epoch)[0]
        return application.plan(self.request.batch, sum(self.placement))

    @property
    def progress_left(self) -> float:
        """Steps of the initial batch until it is done."""
        return float(self.request.application.milestones[-1]) - self.progress

    def _note(self, now: float) -> None:
        """Record a change of GPUs, batch or speed."""
        gpus = sum(self.placement)
        if not gpus:
            phase = Phase(now, 0, 0, 0.0)
        else:
            plan = self.plan
            speed = self.request.application.speed(self.placement, plan, self.epoch)
            phase = Phase(now, gpus, gpus * plan.local * plan.passes, speed)
        if not self.phases or self.phases[-1][1:] != phase[1:]:
            self.phases.append(phase)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.done_at is not None

    def seconds_left_alone(self) -> float:
        """Return the seconds of training left on one GPU, at the efficiency of the present epoch."""
        speed = self.request.application.best((1,), self.epoch)[1]
        return self.progress_left / speed if speed > 0 else math.inf
