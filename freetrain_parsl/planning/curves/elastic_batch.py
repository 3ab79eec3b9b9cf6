"""Elastic batches: the best batch size for each number of nodes, from measured step times and gradient noise. Pure.

The goodput of a batch of b samples on n nodes is its throughput, ``b / t(n, b)``, times its efficiency relative to the
user's batch b0: with the gradient noise scale B, b0 samples in one step advance the training job as far as
``b0 (B + b) / (B + b0)`` samples in steps of b, so the efficiency is ``(B + b0) / (B + b)`` (McCandlish et al., 2018;
Qiao et al., Pollux, 2021). The best goodput for each number of nodes is a scaling curve in samples of the initial batch
per second, so the planner decides about nodes and batches at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.curves.scaling import ScalingCurve

__all__ = ["BatchRange", "ElasticProfile", "NoiseEstimate", "StepDurations"]

_GRID = math.sqrt(2.0)  # ratio of neighbouring candidates
_LARGEST_CHANGE = 2.0  # of the batch size at a time: what is beyond is extrapolated
_GAIN_TO_GROW = 1.1  # of the goodput, so that batches do not alternate
_GAIN_TO_SHRINK = 1.05
_LEAST_STEPS = 10  # of a batch size on a number of nodes before it changes again
_LEAST_SECONDS = 3.0  # of these steps before it returns to a size that it has had: short measurements vary
_MEMORY_SECONDS = 30.0  # of steps of one size: older ones are forgotten
_MOST_POINTS = 64  # of a curve with a point for every number of nodes


@dataclass(frozen=True)
class BatchRange:
    """Batch sizes that a training job may have.

    Parameters
    ----------
    initial
        The user's batch size.
    least, most
        The range, inclusive.
    """

    initial: int
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.initial <= self.most:
            raise PlanningError(f"a range of batch sizes contains the initial one, got {self}")

    def candidates(self) -> list[int]:
        """Return sizes in geometric progression from the initial one, and the limits of the range."""
        below = math.floor(math.log(self.initial / self.least, _GRID))
        above = math.floor(math.log(self.most / self.initial, _GRID))
        grid = {round(self.initial * _GRID**step) for step in range(-below, above + 1)}
        return sorted({size for size in grid if self.least <= size <= self.most} | {self.least, self.most})


@dataclass(frozen=True)
class NoiseEstimate:
    """Squared norm of the true gradient, and variance of the gradient of one sample; neither negative."""

    square: float
    variance: float

    def __post_init__(self) -> None:
        if not (0 <= self.square < math.inf and 0 <= self.variance < math.inf):
            raise PlanningError(f"not an estimate of a gradient's noise: {self}")

    def efficiency(self, batch: int, initial: int) -> float:
        """Return how far a sample in a batch advances the training job, relative to one in the initial batch."""
        denominator = self.variance + batch * self.square
        return (self.variance + initial * self.square) / denominator if denominator > 0 else 1.0


@dataclass
class _Cell:
    """Steps of one batch size on one number of nodes."""

    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps


class StepDurations:
    """Seconds of a step against nodes and samples per node, fitted to measured ones.

    ``t(n, b) = fixed + each · b / n``, and on several nodes ``+ exchange + growth · n``, with coefficients that are not
    negative, by least squares of relative errors. Where batches of one size only have been measured, a step is taken to
    be of fixed duration: other sizes are then tried. Measured sizes have the measured duration.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._coefficients: npt.NDArray[np.float64] | None = None

    def observe(self, nodes: int, batch: int, steps: float, samples: float, seconds: float) -> None:
        """Add steps of a batch size; the last one of an epoch may have had fewer samples.

        Raises
        ------
        PlanningError
            A number is not positive and finite.
        """
        if nodes < 1 or batch < 1 or not all(0 < value < math.inf for value in (steps, samples, seconds)):
            raise PlanningError(
                f"not a measurement: {steps!r} steps of {batch!r} samples in {seconds!r} s on {nodes!r} nodes"
            )
        cell = self._cells.setdefault((nodes, batch), _Cell())
        cell.steps, cell.samples, cell.seconds = cell.steps + steps, cell.samples + samples, cell.seconds + seconds
        if (excess := cell.seconds / _MEMORY_SECONDS) > 1:
            cell.steps, cell.samples, cell.seconds = cell.steps / excess, cell.samples / excess, cell.seconds / excess
        self._coefficients = None

    def steps(self, nodes: int, batch: int) -> float:
        """Return the number of recent steps of this size on so many nodes."""
        return self._cells.get((nodes, batch), _Cell()).steps

    def measured_seconds(self, nodes: int, batch: int) -> float:
        """Return how long recent steps of this size on so many nodes have been measured."""
        return self._cells.get((nodes, batch), _Cell()).seconds

    @property
    def known(self) -> bool:
        """Whether batches of several sizes per node have been measured, so that the model has a slope."""
        local = [cell.samples / cell.steps / nodes for (nodes, _), cell in self._cells.items()]
        return len(local) > 1 and max(local) > 1.2 * min(local)

    def seconds(self, nodes: int, batch: int) -> float:
        """Return the seconds of a step. Something has been measured."""
        cell = self._cells.get((nodes, batch))
        if cell is not None and cell.steps >= _LEAST_STEPS and abs(cell.samples / cell.steps / batch - 1) < 0.05:
            return cell.step_seconds
        if self._coefficients is None:
            self._coefficients = self._fit()
        return float(_features(nodes, batch / nodes) @ self._coefficients)

    def _fit(self) -> npt.NDArray[np.float64]:
        cells = [(nodes, cell.samples / cell.steps / nodes, cell) for (nodes, _), cell in self._cells.items()]
        durations = np.array([cell.step_seconds for *_, cell in cells])
        weights = np.sqrt([cell.seconds for *_, cell in cells])
        rows = np.array([_features(nodes, local) for nodes, local, _ in cells])
        scaled = rows * (weights / durations)[:, None]
        found = _non_negative_least_squares(scaled, weights)
        if not found[:2].any():  # exchanges explain all steps so far: a step on one node would take no time
            found = np.append(_non_negative_least_squares(scaled[:, :2], weights), np.zeros(2))
        return found


def _features(nodes: int, local: float) -> npt.NDArray[np.float64]:
    return np.array([1.0, local, float(nodes > 1), float(nodes) if nodes > 1 else 0.0])


def _non_negative_least_squares(
    rows: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Solve exactly by trying every set of positive coefficients; among equals the first of the smallest sets."""
    count = rows.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            solution, *_ = np.linalg.lstsq(rows[:, chosen], target, rcond=None)
            error = float(np.sum((rows[:, chosen] @ solution - target) ** 2))
            if (solution > 0).all() and error < least - 1e-9 * float(target @ target):
                least, best = error, np.zeros(count)
                best[list(chosen)] = solution
    return best


class ElasticProfile:
    """What is known of a training job with elastic batches."""

    def __init__(self, limits: BatchRange) -> None:
        self.limits = limits
        self.noise: NoiseEstimate | None = None
        self.times = StepDurations()
        self._candidates = limits.candidates()

    def efficiency(self, batch: int) -> float:
        """Return how far a sample in a batch advances the training job, relative to one in the initial batch."""
        return 1.0 if self.noise is None else self.noise.efficiency(batch, self.limits.initial)

    def goodput(self, nodes: int, batch: int) -> float:
        """Return the throughput of a batch times its efficiency, in samples of the initial batch per second."""
        return batch / self.times.seconds(nodes, batch) * self.efficiency(batch)

    def best(self, nodes: int) -> tuple[int, float]:
        """Return the batch of the highest goodput on so many nodes, and this; smaller ones among equals."""
        return self._best(nodes, self._candidates)

    def next_batch(self, nodes: int, batch: int) -> int:
        """Return the batch size to continue with on so many nodes; the same one unless another is clearly better."""
        if self.noise is None or self.times.steps(nodes, batch) < _LEAST_STEPS:
            return batch
        # A gradient that is lost in its noise may be small, or that of a training job that has diverged: no reason to
        # grow.
        most = batch * _LARGEST_CHANGE if self.noise.square > 0 else batch
        near = [size for size in self._candidates if batch / _LARGEST_CHANGE <= size <= most]
        size, goodput = self._best(nodes, near)
        gain = _GAIN_TO_GROW if size > batch else _GAIN_TO_SHRINK
        if self.times.steps(nodes, size) and self.times.measured_seconds(nodes, batch) < _LEAST_SECONDS:
            return batch
        return size if goodput > gain * self.goodput(nodes, batch) else batch

    def curve(self, most_nodes: int) -> ScalingCurve | None:
        """Return the best goodput for each number of nodes; ``None`` while it is not known how batch sizes differ."""
        if self.noise is None or not self.times.known:
            return None
        counts = set(range(1, min(most_nodes, _MOST_POINTS) + 1)) | {most_nodes}
        counts |= {1 << power for power in range(most_nodes.bit_length())}
        return ScalingCurve({nodes: self.best(nodes)[1] for nodes in counts if nodes <= most_nodes})

    def _best(self, nodes: int, sizes: list[int]) -> tuple[int, float]:
        goodputs = [self.goodput(nodes, size) for size in sizes]
        winner = int(np.argmax(goodputs))
        return sizes[winner], goodputs[winner]
