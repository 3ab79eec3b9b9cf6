"""Goodput: throughput times statistical efficiency, at the best batch size for each number of nodes.

The batch size concerns its own training only. The best goodput on n nodes, over all batch sizes, is therefore another
curve over counts, and the count model that allocates nodes decides batch sizes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidTrainer

__all__ = ["BatchLimits", "BatchPlan", "GoodputProfile", "GradientNoise", "StepTimeTable", "best_plan"]

Table = npt.NDArray[np.float64]

StepTimeTable = Callable[[Table], Table]
"""Samples per node and pass -> seconds of a pass, and of its exchange of gradients, shape (2, batches)."""

_CANDIDATES = 64  # batch sizes tried, in geometric progression
_LEAST_SECONDS = 1e-6  # of a pass: extrapolation must not make it zero


class BatchPlan(NamedTuple):
    """How a global batch is computed: on each node `passes` times `local` samples."""

    local: int
    passes: int


@dataclass(frozen=True)
class BatchLimits:
    """Batch sizes that a training may have.

    Parameters
    ----------
    initial, largest
        The global batch that progress is counted in, and the largest one.
    least_local, most_local
        Samples on a node in one pass.
    """

    initial: int
    largest: int
    least_local: int
    most_local: int

    def __post_init__(self) -> None:
        if not (0 < self.initial <= self.largest and 0 < self.least_local <= self.most_local):
            raise InvalidTrainer(f"batch limits must be positive and in order, got {self}")

    def plan(self, batch: int, nodes: int) -> BatchPlan:
        """Divide a global batch among nodes and passes.

        One node takes at least two passes for more than the initial batch: the noise of the gradient is measured
        between them.
        """
        local, passes = self._divide(np.array([batch], dtype=float), nodes)
        return BatchPlan(int(local[0]), int(passes[0]))

    def candidates(self, nodes: int) -> tuple[Table, Table]:
        """Return plans to choose from: samples per pass, and passes, of about evenly spaced batches."""
        least = min(max(self.initial, nodes * self.least_local), self.largest)
        return self._divide(np.unique(np.round(np.geomspace(least, self.largest, _CANDIDATES))), nodes)

    def _divide(self, batches: Table, nodes: int) -> tuple[Table, Table]:
        local = np.ceil(batches / nodes)
        passes = np.ceil(local / self.most_local)
        if nodes == 1:
            passes = np.maximum(passes, np.where(batches > self.initial, 2, 1))
        return np.maximum(np.minimum(np.ceil(local / passes), self.largest // (nodes * passes)), 1), passes


@dataclass(frozen=True)
class GradientNoise:
    """Statistics of the gradient at the initial batch: its squared norm, and its variance between batches."""

    square: float
    variance: float


def steps_worth(batch: Table, initial: int, square: Table | float, variance: Table | float) -> Table:
    """Return how many steps of the initial batch a step of `batch` replaces (McCandlish et al., 2018)."""
    worth: Table = (variance + square) / (variance * initial / batch + square)
    return worth


def best_plan(
    limits: BatchLimits, nodes: int, times: StepTimeTable, worth: Callable[[Table], Table]
) -> tuple[BatchPlan, float]:
    """Return the plan of the highest goodput, and this in steps of the initial batch per second.

    Parameters
    ----------
    limits
        Batch sizes.
    nodes
        Number of nodes.
    times
        Times of a pass there.
    worth
        Batch -> how many steps of the initial batch a step is worth.
    """
    local, passes = limits.candidates(nodes)
    step, exchange = times(local)
    goodput = worth(nodes * local * passes) / (step + (passes - 1) * (step - exchange))
    winner = int(np.argmax(goodput))
    return BatchPlan(int(local[winner]), int(passes[winner])), float(goodput[winner])


class GoodputProfile:
    """Times of a training's passes as measured while it runs, and a model of those not measured.

    A pass computes for a time that is about linear in its samples, then exchanges gradients for a time linear in the
    nodes, with other coefficients within one host than between hosts. The model is optimistic about what has not been
    measured, so that it is tried: without a measurement an exchange is free, and with one number of samples measured,
    others take as long.
    """

    def __init__(self) -> None:
        self._compute: dict[int, list[float]] = {}
        self._exchange: dict[tuple[int, int], list[float]] = {}
        self._best: dict[tuple[BatchLimits, int, int, GradientNoise], tuple[BatchPlan, float]] = {}

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes measured; zero if none."""
        return max((nodes for nodes, _ in self._exchange), default=0)

    def observe(self, nodes: int, hosts: int, local: int, step: float, exchange: float) -> None:
        """Add a measured pass: its seconds, and the part of them spent in the exchange of gradients."""
        if not (nodes >= hosts >= 1 and local >= 1 and 0 <= exchange < step < math.inf):
            raise InvalidTrainer(f"not a measurement: {exchange!r} of {step!r} s on {nodes!r} nodes")
        known = self._compute.setdefault(local, []), self._exchange.setdefault((nodes, hosts), [])
        for times, seconds in zip(known, (step - exchange, exchange), strict=True):
            if not times or abs(times[-1] - seconds) > 1e-3 * seconds:
                times.append(seconds)
                self._best.clear()

    def times(self, nodes: int, hosts: int) -> StepTimeTable:
        """Return the model's times of a pass on so many nodes of so many hosts."""
        exchange = self._exchange_seconds(nodes, hosts)
        known = {local: _mean(seconds) for local, seconds in sorted(self._compute.items())}
        fixed, each = _line(known)
        measured = np.array(list(known), dtype=float)
        residuals = np.array(list(known.values())) - fixed - each * measured

        def table(local: Table) -> Table:
            compute = np.maximum(fixed + each * local + np.interp(local, measured, residuals), _LEAST_SECONDS)
            return np.stack([compute + exchange, np.full(len(local), exchange)])

        return table

    def best(self, limits: BatchLimits, nodes: int, hosts: int, noise: GradientNoise) -> tuple[BatchPlan, float]:
        """Return the plan of the highest goodput in the model; see `best_plan`. Something has been measured."""
        key = limits, nodes, hosts, noise
        if key not in self._best:
            self._best[key] = best_plan(
                limits,
                nodes,
                self.times(nodes, hosts),
                lambda batch: steps_worth(batch, limits.initial, noise.square, noise.variance),
            )
        return self._best[key]

    def _exchange_seconds(self, nodes: int, hosts: int) -> float:
        if nodes == 1:
            return 0.0
        if (nodes, hosts) in self._exchange:
            return _mean(self._exchange[nodes, hosts])
        for between_hosts in dict.fromkeys((hosts > 1, False)):  # between hosts at least what it takes within one
            known: dict[int, float] = {
                n: _mean(seconds) for (n, h), seconds in self._exchange.items() if n > 1 and (h > 1) == between_hosts
            }
            if known:
                fixed, each = _line(known)
                return fixed + each * nodes
        return 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Fit a line with neither coefficient negative: (value at zero, slope). One point is a constant."""
    x, y = np.array(list(points), dtype=float), np.array(list(points.values()))
    if len(x) == 1:
        return float(y[0]), 0.0
    slope, fixed = np.polyfit(x, y, 1)
    if slope < 0:
        return float(y.mean()), 0.0
    return (float(fixed), float(slope)) if fixed >= 0 else (0.0, float(x @ y / (x @ x)))
