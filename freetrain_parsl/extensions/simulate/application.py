"""The physical model of an application: how fast it trains where, with which batch, and how far that brings it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from freetrain_parsl.extensions.goodput.curve import BatchLimits, BatchPlan, GradientNoise, best_plan, steps_worth

if TYPE_CHECKING:
    from freetrain_parsl.extensions.simulate.jobs.step_times import Placement, StepTimes

__all__ = ["Application", "Efficiency"]

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Statistical efficiency, measured in training jobs at fixed batches.

    Parameters
    ----------
    batches
        The measured global batches, increasing, shape (B,).
    progress
        Progress at the end of each epoch, in steps of the initial batch, shape (epochs, B).
    iterations
        Steps of that batch until the end of each epoch, shape (epochs, B).
    grad_sqr, grad_var
        Squared norm and variance of the gradient during each epoch, shape (epochs, B).
    """

    batches: Table
    progress: Table
    iterations: Table
    grad_sqr: Table
    grad_var: Table


@dataclass(frozen=True, eq=False)
class Application:
    """An application that jobs train for a number of epochs.

    Progress is counted in steps of the initial batch: a step of a larger batch is worth as many of these as the
    gradient's noise allows (Pollux, OSDI 2021). The nodes of `limits` are GPUs.
    """

    name: str
    epochs: int
    limits: BatchLimits
    step_times: StepTimes
    efficiency: Efficiency
    _best: dict[tuple[Placement, int], tuple[BatchPlan, float]] = field(default_factory=dict, init=False, repr=False)
    _speeds: dict[tuple[Placement, BatchPlan, int], float] = field(default_factory=dict, init=False, repr=False)

    @property
    def max_gpus(self) -> int:
        """The most GPUs that it may have; one if its largest batch fits on one, because it then gains nothing."""
        limits = self.limits
        return 1 if limits.most_local >= limits.largest else limits.largest // limits.least_local

    @cached_property
    def milestones(self) -> Table:
        """Progress at which epochs end, shape (epochs + 1,), beginning with zero."""
        return np.concatenate([[0.0], self.efficiency.progress.min(axis=1)])

    def step_seconds(self, placement: Placement, plan: BatchPlan) -> float:
        """Return the seconds of a step: gradients are exchanged in the last pass only."""
        step, sync = self.step_times(placement, plan.local)
        return step + (plan.passes - 1) * (step - sync)

    def noise(self, batch: float, epoch: int) -> GradientNoise:
        """Return the statistics of the gradient in an epoch, counted from zero, of a training job at this batch."""
        square, variance = self._noise(np.array([batch]), epoch)[:, 0]
        return GradientNoise(float(square), float(variance))

    def _noise(self, batches: Table, epoch: int) -> Table:
        known = self.efficiency
        return np.stack([np.interp(batches, known.batches, table[epoch]) for table in (known.grad_sqr, known.grad_var)])

    def _worth(self, batches: Table, epoch: int) -> Table:
        return steps_worth(batches, self.limits.initial, *self._noise(batches, epoch))

    def worth(self, batch: float, epoch: int) -> float:
        """Return how many steps of the initial batch a step of `batch` replaces in an epoch, counted from zero."""
        return float(self._worth(np.array([batch], dtype=float), epoch)[0])

    def speed(self, placement: Placement, plan: BatchPlan, epoch: int) -> float:
        """Return the progress per second."""
        key = placement, plan, epoch
        if key not in self._speeds:
            batch = sum(placement) * plan.local * plan.passes
            self._speeds[key] = self.worth(batch, epoch) / self.step_seconds(placement, plan)
        return self._speeds[key]

    def best(self, placement: Placement, epoch: int) -> tuple[BatchPlan, float]:
        """Return the fastest way to compute a step there in an epoch, and its progress per second."""
        key = placement, epoch
        if key not in self._best:
            self._best[key] = best_plan(
                self.limits,
                sum(placement),
                lambda local: self.step_times.table(placement, local),
                lambda batches: self._worth(batches, epoch),
            )
        return self._best[key]

    def seconds(self, placement: Placement, batch: int) -> float:
        """Return the seconds that a whole job takes there at a fixed batch."""
        known = self.efficiency
        iterations = float(np.interp(batch, known.batches, known.iterations[-1]))
        return iterations * self.step_seconds(placement, self.limits.plan(batch, sum(placement)))

    def iterations_after(self, epoch: int, batch: int) -> float:
        """Return the steps of a fixed batch in the epochs after this one, at least one step.

        Optimus counts the work left like this in Pollux' evaluation: the present epoch is as good as done.
        """
        known = self.efficiency
        total, done = (float(np.interp(batch, known.batches, known.iterations[e])) for e in (-1, epoch))
        return max(total - done, 1.0)
