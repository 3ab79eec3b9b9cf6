"""The least regret over the core of the count model: a dynamic programme over the nodes that trainers use together.

::

    min  sum_j r_j(n_j) + L (N - sum_j n_j)      subject to      sum_j n_j <= N,      n_j in the core of trainer j

It adds one trainer after another and keeps, for each number of nodes, the least regret of the trainers so far. Regrets
are never negative, so that whatever exceeds the regret of a known solution is dropped at once. What is left lies close
to the nodes that the relaxation gives to the trainers so far: its time depends little on N, and does not vary as that
of branch and bound does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.solvers.highs import Counts, Table

__all__ = ["least_regret"]


def least_regret(
    cores: Sequence[tuple[Counts, Table]], nodes: int, price: float, limit: float, *, most: int
) -> tuple[Counts, float] | None:
    """Return counts of the least regret, and that regret.

    Parameters
    ----------
    cores
        The counts that each trainer may have, ascending, and their regrets.
    nodes, price
        N and L: an idle node costs its price.
    limit
        A known regret: solutions with more are left out.
    most
        How many sums it may form.

    Returns
    -------
    tuple or None
        ``None`` if it would form more sums, or if rounding leaves no solution.
    """
    first, losses = 0, np.zeros(1)  # what trainers so far can use together: `first`, `first` + 1, ... nodes
    steps: list[tuple[int, Counts]] = []  # of each trainer: the first sum, and its choice for each sum
    for counts, regrets in cores:
        low, reach = int(counts[0]), int(counts[-1] - counts[0])
        sums = min(len(losses) + reach, nodes - first - low + 1)
        most -= len(counts) * sums
        if most < 0 or sums <= 0:
            return None
        padded = np.full(len(losses) + 2 * reach, np.inf)
        padded[reach : reach + len(losses)] = losses
        totals = padded[np.arange(reach, reach + sums) - (counts - low)[:, None]] + regrets[:, None]
        choices = totals.argmin(axis=0)
        losses = totals[choices, np.arange(sums)]
        kept = np.flatnonzero(losses <= limit)
        if not len(kept):
            return None
        first, here = first + low + int(kept[0]), slice(int(kept[0]), int(kept[-1]) + 1)
        losses = losses[here]
        steps.append((first, counts[choices[here]]))
    ends = losses + price * (nodes - first - np.arange(len(losses)))
    used = first + int(ends.argmin())
    found = np.zeros(len(cores), dtype=np.int64)
    for row in range(len(cores) - 1, -1, -1):
        begin, chosen = steps[row]
        found[row] = chosen[used - begin]
        used -= int(found[row])
    return found, float(ends.min())
