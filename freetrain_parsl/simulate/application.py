"""The physical model of an application: how fast it trains where, with which batch, and how far that brings it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from freetrain_parsl.simulate.step_times import Placement, StepTimes

__all__ = ["Application", "BatchPlan", "Efficiency"]

Table = npt.NDArray[np.float64]

_CANDIDATES = 64  # batch sizes tried, in geometric progression


class BatchPlan(NamedTuple):
    """How a global batch is computed: on each GPU `passes` times `local` samples."""

    local: int
    passes: int


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Statistical efficiency, measured in trainings at fixed batches.

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
    """An application that jobs train.

    Progress is counted in steps of the initial batch: a step of a larger batch is worth as many of these as the
    gradient's noise allows (Pollux, OSDI 2021).

    Parameters
    ----------
    name
        Its name in workloads.
    epochs
        A job is done after so many.
    init_batch, max_batch
        The global batch that progress is counted in, and the largest one.
    min_local_batch, max_local_batch
        Samples on a GPU in one pass.
    step_times
        Times of a step.
    efficiency
        Worth of a step.
    """

    name: str
    epochs: int
    init_batch: int
    max_batch: int
    min_local_batch: int
    max_local_batch: int
    step_times: StepTimes
    efficiency: Efficiency
    _best: dict[tuple[Placement, int], tuple[BatchPlan, float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def max_gpus(self) -> int:
        """The most GPUs that it may have; one if its largest batch fits on one, because it then gains nothing."""
        return 1 if self.max_local_batch >= self.max_batch else self.max_batch // self.min_local_batch

    @cached_property
    def milestones(self) -> Table:
        """Progress at which epochs end, shape (epochs + 1,), beginning with zero."""
        return np.concatenate([[0.0], self.efficiency.progress.min(axis=1)])

    def plan(self, batch: int, gpus: int) -> BatchPlan:
        """Divide a global batch among GPUs and passes.

        One GPU takes at least two passes for more than the initial batch: the noise of the gradient is measured between
        them.
        """
        local = math.ceil(batch / gpus)
        passes = math.ceil(local / self.max_local_batch)
        if gpus == 1 and batch > self.init_batch:
            passes = max(passes, 2)
        return BatchPlan(min(math.ceil(local / passes), self.max_batch // (gpus * passes)), passes)

    def step_seconds(self, placement: Placement, plan: BatchPlan) -> float:
        """Return the seconds of a step: gradients are exchanged in the last pass only."""
        step, sync = self.step_times(placement, plan.local)
        return step + (plan.passes - 1) * (step - sync)

    def worth(self, batch: float, epoch: int) -> float:
        """Return how many steps of the initial batch a step of `batch` replaces in an epoch, counted from zero."""
        known = self.efficiency
        squares = float(np.interp(batch, known.batches, known.grad_sqr[epoch]))
        variance = float(np.interp(batch, known.batches, known.grad_var[epoch]))
        return (variance + squares) / (variance * self.init_batch / batch + squares)

    def speed(self, placement: Placement, plan: BatchPlan, epoch: int) -> float:
        """Return the progress per second."""
        batch = sum(placement) * plan.local * plan.passes
        return self.worth(batch, epoch) / self.step_seconds(placement, plan)

    def best(self, placement: Placement, epoch: int) -> tuple[BatchPlan, float]:
        """Return the fastest way to compute a step there in an epoch, and its progress per second."""
        key = placement, epoch
        if key not in self._best:
            self._best[key] = self._search(placement, epoch)
        return self._best[key]

    def iterations_after(self, epoch: int, batch: int) -> float:
        """Return the steps of a fixed batch in the epochs after this one, at least one step.

        Optimus counts the work left like this in Pollux' evaluation: the present epoch is as good as done.
        """
        known = self.efficiency
        total, done = (float(np.interp(batch, known.batches, known.iterations[e])) for e in (-1, epoch))
        return max(total - done, 1.0)

    def _search(self, placement: Placement, epoch: int) -> tuple[BatchPlan, float]:
        gpus = sum(placement)
        least = max(self.init_batch, gpus * self.min_local_batch)
        batches = np.unique(np.round(np.geomspace(min(least, self.max_batch), self.max_batch, _CANDIDATES)))
        local = np.ceil(batches / gpus)
        passes = np.ceil(local / self.max_local_batch)
        if gpus == 1:
            passes[batches > self.init_batch] = np.maximum(passes[batches > self.init_batch], 2)
        local = np.maximum(np.minimum(np.ceil(local / passes), self.max_batch // (gpus * passes)), 1)
        batches = gpus * local * passes
        step, sync = self.step_times.table(placement, local)
        known = self.efficiency
        squares = np.interp(batches, known.batches, known.grad_sqr[epoch])
        variance = np.interp(batches, known.batches, known.grad_var[epoch])
        worth = (variance + squares) / (variance * self.init_batch / batches + squares)
        speeds = worth / (step + (passes - 1) * (step - sync))
        winner = int(np.argmax(speeds))
        return BatchPlan(int(local[winner]), int(passes[winner])), float(speeds[winner])
