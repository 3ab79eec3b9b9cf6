"""Goodput: throughput times statistical efficiency, at the best batch size for each number of nodes.

The batch size concerns its own training job only. The best goodput on n nodes, over all batch sizes, is therefore
another curve over counts, and the count model that allocates nodes decides batch sizes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidApp

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
    """Batch sizes that a training job may have.

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
            raise InvalidApp(f"batch limits must be positive and in order, got {self}")

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


class _Pass(NamedTuple):
    """Seconds of a pass."""

    compute: float
    exchange: float


class GoodputProfile:
    """Times of a training job's passes as measured while it runs, and a model of those not measured.

    Times are predicted as last measured on the same nodes and hosts, interpolated between numbers of samples; beyond
    these, computing takes in proportion to a line through all measurements. Elsewhere computing takes as long as with
    the closest number of nodes per host, which share processors and memory, and an exchange of gradients as long as on
    the closest number of nodes: in a ring, the traffic of each hardly depends on their number (Patarasuk and Yuan,
    2009). The model is optimistic about what has not been measured, so that it is tried: without a measurement an
    exchange is free, and with one number of samples measured, others take as long.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], dict[int, _Pass]] = {}
        self._usual: Callable[[Table], Table] | None = None
        self._best: dict[tuple[BatchLimits, int, int, GradientNoise], tuple[BatchPlan, float]] = {}

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes measured; zero if none."""
        return max((nodes for nodes, _ in self._passes), default=0)

    def observe(self, nodes: int, hosts: int, local: int, step: float, exchange: float) -> None:
        """Add a measured pass: its seconds, and the part of them spent in the exchange of gradients."""
        if not (nodes >= hosts >= 1 and local >= 1 and 0 <= exchange < step < math.inf):
            raise InvalidApp(f"not a measurement: {exchange!r} of {step!r} s on {nodes!r} nodes")
        known, measured = self._passes.setdefault((nodes, hosts), {}), _Pass(step - exchange, exchange)
        if known.get(local) != measured:
            known[local] = measured
            self._usual = None
            self._best.clear()

    def times(self, nodes: int, hosts: int) -> StepTimeTable:
        """Return the model's times of a pass on so many nodes of so many hosts. Something has been measured."""
        usual = self._usual = self._usual or self._usual_compute()
        similar = min(self._passes, key=lambda at: (_log_ratio(at[0] * hosts, nodes * at[1]), _log_ratio(at[0], nodes)))
        measured, seconds, _ = _columns(self._passes[similar])
        ratios = seconds / usual(measured)
        exchange = self._exchange(nodes, hosts)

        def table(local: Table) -> Table:
            compute, exchanged = usual(local) * np.interp(local, measured, ratios), exchange(local)
            return np.stack([compute + exchanged, exchanged])

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

    def _usual_compute(self) -> Callable[[Table], Table]:
        """Return the mean seconds of computing on all nodes measured, by the number of samples."""
        seconds: dict[int, list[float]] = {}
        for passes in self._passes.values():
            for local, (compute, _) in passes.items():
                seconds.setdefault(local, []).append(compute)
        known = {local: _mean(all_seconds) for local, all_seconds in sorted(seconds.items())}
        fixed, each = _line(known)
        measured = np.array(list(known), dtype=float)
        residuals = np.array(list(known.values())) - fixed - each * measured
        return lambda local: np.maximum(fixed + each * local + np.interp(local, measured, residuals), _LEAST_SECONDS)

    def _exchange(self, nodes: int, hosts: int) -> Callable[[Table], Table]:
        """Return the seconds of the exchange by the number of samples."""
        if nodes == 1:
            return np.zeros_like
        for between_hosts in dict.fromkeys((hosts > 1, False)):  # between hosts at least what it takes within one
            known = [at for at in self._passes if at[0] > 1 and (at[1] > 1) == between_hosts]
            if known:
                similar = min(known, key=lambda at: (_log_ratio(at[0], nodes), _log_ratio(at[1], hosts), -at[0]))
                measured, _, seconds = _columns(self._passes[similar])
                return lambda local: np.interp(local, measured, seconds)
        return np.zeros_like


def _columns(passes: dict[int, _Pass]) -> tuple[Table, Table, Table]:
    """Return the numbers of samples in order, and the seconds of computing and of the exchange with each."""
    local = sorted(passes)
    compute, exchange = np.array([passes[samples] for samples in local]).T
    return np.array(local, dtype=float), compute, exchange


def _log_ratio(one: int, other: int) -> float:
    """Return by what factor two numbers differ, as a logarithm: zero if they are equal, never negative."""
    return abs(math.log(one / other))


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
