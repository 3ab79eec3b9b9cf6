"""Measured times of a training step, by placement and batch, and interpolation between them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["MeasuredStepTimes", "Measurement", "Placement", "StepTimes", "packed"]

Table = npt.NDArray[np.float64]

Placement = tuple[int, ...]
"""GPUs on each node that a job uses, in the order of the ring in which gradients are exchanged."""


class Measurement(NamedTuple):
    """One measured step, or a mean over placements (``None``), in seconds; the exchange of gradients is part of it."""

    nodes: int
    gpus: int
    placement: Placement | None
    local_batch: int
    step_time: float
    sync_time: float


class StepTimes(Protocol):
    """Times of a step of one application, by placement and samples on each GPU."""

    def __call__(self, placement: Placement, local_batch: int) -> tuple[float, float]:
        """Return the seconds of a step, and of its exchange of gradients."""

    def table(self, placement: Placement, local_batch: Table) -> Table:
        """Tabulate the two times over numbers of samples on each GPU, shape (2, batches)."""


class _Curve:
    """(step time, exchange time) over the samples on each GPU; linear, and constant beyond the ends."""

    def __init__(self, rows: Iterable[Measurement]) -> None:
        sums: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            sums[row.local_batch].append((row.step_time, row.sync_time))
        batches = sorted(sums)
        self.batches = np.array(batches, dtype=float)
        self.times = np.array([np.mean(sums[batch], axis=0) for batch in batches])

    def __call__(self, batch: Table) -> Table:
        """Return the two times, shape (2, batches)."""
        return np.stack([np.interp(batch, self.batches, self.times[:, column]) for column in (0, 1)])


class MeasuredStepTimes:
    """Times of a step, measured, and interpolated where they were not.

    A measured placement is interpolated linearly in the samples on each GPU. For others, means over placements are
    interpolated in the samples, then in GPUs, then between the measured numbers of nodes at equal GPUs per node.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        exact: dict[Placement, list[Measurement]] = defaultdict(list)
        means: dict[int, dict[int, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
        for row in measurements:
            if row.placement is not None:
                exact[_smallest_rotation(row.placement)].append(row)
            means[row.nodes][row.gpus].append(row)
        self._exact = {placement: _Curve(rows) for placement, rows in exact.items()}
        self._means = {
            nodes: {gpus: _Curve(rows) for gpus, rows in sorted(by_gpus.items())} for nodes, by_gpus in means.items()
        }
        self._nodes = sorted(self._means)
        self._at = lru_cache(maxsize=None)(self._one)

    def __call__(self, placement: Placement, local_batch: int) -> tuple[float, float]:
        """Return the seconds of a step, and of its exchange of gradients."""
        return self._at(placement, local_batch)

    def _one(self, placement: Placement, local_batch: int) -> tuple[float, float]:
        step, sync = self.table(placement, np.array([local_batch], dtype=float))[:, 0]
        return float(step), float(sync)

    def table(self, placement: Placement, local_batch: Table) -> Table:
        """Tabulate the two times over numbers of samples on each GPU, shape (2, batches)."""
        curve = self._exact.get(_smallest_rotation(placement))
        if curve is not None:
            return curve(local_batch)
        return self._between_nodes(len(placement), sum(placement), local_batch)

    def _between_nodes(self, nodes: int, gpus: int, local_batch: Table) -> Table:
        right = bisect_right(self._nodes, nodes)
        low, high = self._nodes[max(right - 1, 0)], self._nodes[min(right, len(self._nodes) - 1)]
        below = self._between_gpus(low, gpus * low / nodes, local_batch)
        if low >= high or nodes <= low:
            return below
        above = self._between_gpus(high, gpus * high / nodes, local_batch)
        share = (nodes - low) / (high - low)
        return (1 - share) * below + share * above

    def _between_gpus(self, nodes: int, gpus: float, local_batch: Table) -> Table:
        curves = self._means[nodes]
        known = list(curves)
        right = bisect_right(known, gpus)
        low, high = known[max(right - 1, 0)], known[min(right, len(known) - 1)]
        below = curves[low](local_batch)
        if low >= high or gpus <= low:
            return below
        share = (gpus - low) / (high - low)
        return (1 - share) * below + share * curves[high](local_batch)


def packed(gpus: int, gpus_per_node: int) -> Placement:
    """Return the placement of some GPUs on the fewest nodes."""
    full, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


@lru_cache(maxsize=4096)
def _smallest_rotation(placement: Placement) -> Placement:
    return min(placement[i:] + placement[:i] for i in range(len(placement)))
