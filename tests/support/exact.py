"""Both models without a solver: counts, term by term and by a dynamic programme; windows, by exhaustive search."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.objectives.base import Objective
    from freetrain_parsl.planning.solvers.window_model import WindowInstance

__all__ = ["best_value", "best_window_value", "trainer_value", "value"]


def value(objective: Objective, trainer: PlannedJob, current: int, nodes: int, horizon: float) -> float:
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
    allowed = [n for n in range(trainer.min_nodes, trainer.max_nodes + 1) if trainer.may_have(n)]
    before = objective(trainer, min(allowed, key=lambda n: abs(n - current)))
    if nodes == current:
        return horizon * rate
    change = trainer.costs.up if nodes > current else trainer.costs.down
    few, many = sorted((nodes, current))
    share = max(1 / many, 1 / few - 1 / many) if few else 0.0
    return horizon * rate - (change + share * trainer.costs.sharded_bytes / trainer.costs.bandwidth) * before


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


def trainer_value(instance: WindowInstance, trainer: int, nodes: Sequence[int]) -> float:
    """Return V_j(nodes); see `planning.solvers.window_model`. Minus infinity if the total is not allowed.

    Parameters
    ----------
    instance
        The problem.
    trainer
        Index of the trainer.
    nodes
        Its nodes of each class.
    """
    rates = instance.rates[trainer].tolist()
    has = instance.current[trainer].tolist()
    down, checkpoint = float(instance.down[trainer]), float(instance.checkpoint[trainer])

    def allowed(count: int) -> bool:
        return count == 0 or (count < len(rates) and math.isfinite(rates[count]))

    def rate(count: int) -> float:
        return rates[count] if count and allowed(count) else 0.0

    def alive(moment: float) -> int:
        return sum(
            n
            for n, closes, offered in zip(nodes, instance.closings, instance.is_offered, strict=True)
            if moment < closes and not (offered and moment < instance.startup)
        )

    if not allowed(sum(nodes)):
        return -math.inf
    times = sorted({0.0, instance.horizon, *instance.closings.tolist(), instance.startup})
    times = [time for time in times if time <= instance.horizon]
    ends = [min(closes, instance.horizon) for closes in instance.closings.tolist()]
    shares = [float(closes < instance.horizon) for closes in instance.closings.tolist()]
    if instance.shares is not None:
        shares = instance.shares.tolist()
    total = 0.0
    for start, end in itertools.pairwise(times):
        now = alive((start + end) / 2)
        total += (end - start) * rate(now)
        closing = [k for k, closes in enumerate(ends) if closes == end]
        for share in sorted({shares[k] for k in closing}, reverse=True):
            together = [k for k in closing if shares[k] == share and nodes[k]]
            total -= share * (down + checkpoint) * rate(now) if together else 0.0
            now -= sum(nodes[k] for k in together if end > instance.startup or not instance.is_offered[k])
    if sum(has) == 0:
        return total - float(instance.start[trainer]) * rate(sum(nodes))
    possible = [n for n in range(1, len(rates)) if allowed(n)]
    before = rate(min(possible, key=lambda n: abs(n - sum(has)))) if possible else 0.0
    few, many = sorted((sum(nodes), sum(has)))
    share = max(1 / many, 1 / few - 1 / many) if few else 0.0
    moving = 0.0 if instance.moving is None else share * float(instance.moving[trainer])
    if any(n > h for n, h in zip(nodes, has, strict=True)):
        return total - (float(instance.up[trainer]) + moving) * before
    if any(n < h for n, h in zip(nodes, has, strict=True)):
        return total - (down + moving) * before
    return total


def best_window_value(instance: WindowInstance) -> float:
    """Return the optimum of a tiny problem by exhaustive search.

    Parameters
    ----------
    instance
        The problem; the work grows with the product of the sizes of the classes, squared.
    """
    offered = instance.is_offered.tolist()
    sizes = [
        int(size) if not out or (closes - instance.startup >= instance.min_useful and closes > instance.startup) else 0
        for size, closes, out in zip(instance.sizes, instance.closings, offered, strict=True)
    ]
    choices = list(itertools.product(*(range(size + 1) for size in sizes)))
    best = {tuple(0 for _ in sizes): 0.0}  # nodes used by the trainers so far -> their value
    for trainer in range(len(instance.rates)):
        values = {choice: trainer_value(instance, trainer, choice) for choice in choices}
        extended: dict[tuple[int, ...], float] = {}
        for used, value in best.items():
            for choice, more in values.items():
                both = tuple(u + n for u, n in zip(used, choice, strict=True))
                if more > -math.inf and all(n <= size for n, size in zip(both, sizes, strict=True)):
                    extended[both] = max(extended.get(both, -math.inf), value + more)
        best = extended
    most = math.inf if instance.max_blocks is None else instance.max_blocks
    return max(
        value for used, value in best.items() if sum(n > 0 for n, out in zip(used, offered, strict=True) if out) <= most
    )
