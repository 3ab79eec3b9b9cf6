"""A job in the simulated cluster: its progress on the GPUs that it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from freetrain_parsl.extensions.goodput.curve import BatchPlan, GoodputProfile, GradientNoise
    from freetrain_parsl.extensions.simulate.jobs.step_times import Placement
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest

__all__ = ["Phase", "SimulatedJob"]

_MOST_TRIALS = 8  # batches that a job with unknown curves tries in a row


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
    profile
        What is measured while it runs, from which batches are then chosen; ``None`` if its curves are known.
    """

    request: JobRequest
    elastic_batch: bool
    profile: GoodputProfile | None = None
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

    def move(self, slots: frozenset[str], placement: Placement, now: float) -> None:
        """Continue on other slots, after a pause; without slots, wait."""
        had, costs = len(self.slots), self.request.costs
        self.slots, self.placement = slots, placement
        if slots:
            self.restarts += 1
            # Other slots of the same number are a stop and a start.
            changed = costs.up if len(slots) > had else costs.down if len(slots) < had else costs.start
            self.standing = changed if had else costs.start
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
            self._measure()
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
        application, gpus = self.request.application, sum(self.placement)
        limits = application.limits
        if not self.elastic_batch:
            return limits.plan(self.request.batch, gpus)
        if self.profile is None:
            return application.best(self.placement, self.epoch)[0]
        if not self.profile.most_nodes:
            return limits.plan(max(limits.initial, limits.least_local * gpus), gpus)
        return self.profile.best(limits, gpus, len(self.placement), self.noise)[0]

    @property
    def noise(self) -> GradientNoise:
        """The gradient's statistics as measured now, at the batch before this epoch."""
        batch = self.phases[-1].batch if self.phases else 0
        return self.request.application.noise(batch or self.request.application.limits.initial, self.epoch)

    def _measure(self) -> None:
        """Measure passes until the best batch no longer changes; that takes seconds."""
        if self.profile is None:
            return
        for _ in range(_MOST_TRIALS):
            plan = self.plan
            step, exchange = self.request.application.step_times(self.placement, plan.local)
            self.profile.observe(sum(self.placement), len(self.placement), plan.local, step, exchange)
            if self.plan == plan:
                return

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
