"""What a policy maximises: value per second of a trainer on a number of nodes, and the value of a change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import Trainer

__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveLike",
    "objective_table",
    "register_objective",
    "resolve_objective",
    "value_table",
]

Objective = Callable[[Trainer, int], float]
"""(trainer, nodes) -> value per second, finite and not negative; asked only within the trainer's bounds."""

ObjectiveLike = str | Objective

Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WeightedRate:
    """Throughput times a weight of the trainer: what all named objectives are, and quick to tabulate.

    Parameters
    ----------
    weight
        Trainer -> factor.
    """

    weight: Callable[[Trainer], float]

    def __call__(self, trainer: Trainer, nodes: int) -> float:
        return self.weight(trainer) * trainer.rate(nodes)


def _one(trainer: Trainer) -> float:  # noqa: ARG001 - the signature of a weight
    return 1.0


def _per_smallest_rate(trainer: Trainer) -> float:
    rate = trainer.rate(trainer.min_nodes)
    if rate > 0:
        return 1.0 / rate
    # Nothing is known at min_nodes (a rate of zero): the first point that trains at all is the unit instead.
    rates = (r for nodes, r in trainer.curve.points if nodes > trainer.min_nodes and r > 0)
    unit = next(rates, 0.0)
    return 1.0 / unit if unit else 0.0


def _priority(trainer: Trainer) -> float:
    return trainer.priority * _per_smallest_rate(trainer)


OBJECTIVES: dict[str, Objective] = {
    "throughput": WeightedRate(_one),
    "speedup": WeightedRate(_per_smallest_rate),
    "priority": WeightedRate(_priority),
}
"""Name -> objective. Throughput: samples per second. Speedup: that, in units of the trainer's rate on its
``min_nodes``. Priority: speedup times the trainer's priority."""


def register_objective(name: str, objective: Objective) -> None:
    """Add an objective under a name; a name that is taken is refused."""
    if name in OBJECTIVES:
        raise InvalidSettings(f"objective {name!r} exists already; choose another name")
    OBJECTIVES[name] = objective


def resolve_objective(objective: ObjectiveLike) -> Objective:
    """Find an objective by its name; a callable is one already.

    Raises
    ------
    InvalidSettings
        There is none of that name, or it is not callable.
    """
    if isinstance(objective, str):
        if objective not in OBJECTIVES:
            raise InvalidSettings(f"no objective {objective!r}; known are {', '.join(sorted(OBJECTIVES))}")
        return OBJECTIVES[objective]
    if not callable(objective):
        raise InvalidSettings(f"an objective is a name or a function (trainer, nodes) -> float, got {objective!r}")
    return objective


def objective_table(objective: Objective, trainer: Trainer, max_nodes: int) -> Table:
    """Tabulate O_j(0), …, O_j(max_nodes), shape (max_nodes + 1,), value per second.

    Zero on no nodes; NaN outside the trainer's bounds, where an objective is never asked.

    Raises
    ------
    InvalidSettings
        The objective returned something else than a finite number of at least zero.
    """
    table = np.full(max_nodes + 1, np.nan)
    first, last = trainer.min_nodes, min(trainer.max_nodes, max_nodes)
    if isinstance(objective, WeightedRate):
        weight = _checked(objective.weight(trainer), trainer, None)
        table[first : last + 1] = weight * trainer.curve.rates(last)[first:]
    else:
        for nodes in range(first, last + 1):
            table[nodes] = _checked(objective(trainer, nodes), trainer, nodes)
    table[0] = 0.0
    return table


def value_table(objective: Objective, trainer: Trainer, current: int, max_nodes: int, horizon: float) -> Table:
    """Tabulate v_j(0), …, v_j(max_nodes): what counts are worth over the horizon, less the change.

    ::

        v(n) = T O(n) - [n > C] R_up O(C) - [n < C] R_down O(C) - [C = 0 < n] R_start O(n)

    A trainer whose `current` count C is outside its bounds (it has lost nodes) cannot go on as it is: it
    stops, which costs as a shrink, or goes to an allowed count, which costs as a grow or a shrink. O(C) is
    then that of the nearest bound.

    Parameters
    ----------
    objective
        O, value per second.
    trainer
        Whose.
    current
        C, its number of nodes now that are still in the pool.
    max_nodes
        The largest count that is asked for.
    horizon
        T, seconds that a decision is expected to last.

    Returns
    -------
    numpy.ndarray
        Shape (max_nodes + 1,), units of the objective times seconds; minus infinity for counts not allowed.
    """
    nearest = min(max(current, trainer.min_nodes), trainer.max_nodes)
    rates = objective_table(objective, trainer, max(max_nodes, nearest if current else 0))
    before = rates[nearest] if current else 0.0
    rates = rates[: max_nodes + 1]
    values = horizon * rates
    values[current + 1 :] -= trainer.costs.up * before
    values[:current] -= trainer.costs.down * before
    if current == 0:
        values -= trainer.costs.start * rates
    return np.where(np.isnan(values), -np.inf, values)


def _checked(value: Any, trainer: Trainer, nodes: int | None) -> float:
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        where = "" if nodes is None else f" on {nodes} nodes"
        raise InvalidSettings(
            f"the objective must return a finite number of at least zero, got {value!r} "
            f"for trainer {trainer.name!r}{where}"
        )
    return number
