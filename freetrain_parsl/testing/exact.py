"""The count model without a solver: its formula term by term, and a dynamic program over counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import Trainer
    from freetrain_parsl.planning.objectives.base import Objective

__all__ = ["best_value", "value"]


def value(objective: Objective, trainer: Trainer, current: int, nodes: int, horizon: float) -> float:
    """Return v_j(nodes) of the count model; see `freetrain_parsl.planning.objectives.base.value_table`.

    Parameters
    ----------
    objective
        Value per second.
    trainer
        The trainer.
    current, nodes
        Its number of nodes before and after.
    horizon
        T, seconds.
    """
    rate = objective(trainer, nodes) if nodes else 0.0
    if current == 0:
        return (horizon - trainer.costs.start) * rate
    before = objective(trainer, min(max(current, trainer.min_nodes), trainer.max_nodes))
    if nodes > current:
        return horizon * rate - trainer.costs.up * before
    if nodes < current:
        return horizon * rate - trainer.costs.down * before
    return horizon * rate


def best_value(values: npt.NDArray[np.float64]) -> float:
    """Return max sum_j v_j(n_j) with sum_j n_j <= N, by dynamic programming in O(J N^2).

    Parameters
    ----------
    values
        v_j(n), shape (J, N + 1); minus infinity where a count is not allowed.
    """
    size = values.shape[1]
    best = np.zeros(size)  # value of the trainers so far, by maximum number of nodes
    for row in values:
        extended = np.full(size, -np.inf)
        for nodes in np.flatnonzero(np.isfinite(row)):
            np.maximum(extended[nodes:], best[: size - nodes] + row[nodes], out=extended[nodes:])
        best = extended
    return float(best[-1])
