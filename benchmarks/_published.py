"""The published node-level allocation model (BFTrainer, arXiv 2106.12091), reimplemented for CBC.

Binary x[j, i] gives node i to trainer j; SOS2 weights through the breakpoints of the scaling curve give its
throughput; binaries mark growing and shrinking; a trainer may only add nodes or only drop nodes::

    max  sum_j  T S_j - up_j R_up_j O_j(C_j) - down_j R_down_j O_j(C_j)
    sum_j x[j, i] <= 1                       n_j = sum_i x[j, i],  0 or min_j <= n_j <= max_j
    n_j - C_j <= N up_j                      C_j - n_j <= N down_j
    D_j <= n_j - C_j + M z_j                 D_j <= C_j - n_j + M (1 - z_j),  z_j binary

where D_j counts the nodes of j that change. A shrinking trainer has z_j = 1, and the row on the left becomes
2 (C_j - n_j) <= M; a growing one has z_j = 0, and the one on the right becomes 2 (n_j - C_j) <= M. So the
published M = N + 1 forbids changes of more than half of the pool, and M = 2 N + 1 forbids nothing. The start
cost of our model is added, as a shorter T for starting trainers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mip

from freetrain_parsl.planning.placement import current_counts

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.objectives.base import Objective
    from freetrain_parsl.testing.instances import Instance


@dataclass(frozen=True)
class PublishedSolution:
    """Result of CBC.

    Parameters
    ----------
    objective
        Value of the best allocation, or None if there is none.
    seconds
        Wall time of the solve, without model construction.
    finished
        Whether it ended before the time limit.
    allocation
        PlannedJob -> its nodes, if there is a best allocation.
    """

    objective: float | None
    seconds: float
    finished: bool
    allocation: dict[str, frozenset[str]]


def solve_published(
    case: Instance, objective: Objective, horizon: float, big_m: int, time_limit: float
) -> PublishedSolution:
    """Solve one instance; `time_limit` in seconds, one thread, CBC's own defaults otherwise."""
    model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    held = current_counts(case.trainers, case.pool, case.current)
    terms = []
    taken: dict[str, list[mip.Var]] = {node: [] for node in case.pool}
    given: dict[str, dict[str, mip.Var]] = {}
    for trainer in case.trainers:
        current = held[trainer.name]
        x = {node: model.add_var(var_type=mip.BINARY) for node in case.pool}
        given[trainer.name] = x
        for node, var in x.items():
            taken[node].append(var)
        count = mip.xsum(x.values())
        runs, up, down, shrinks = (model.add_var(var_type=mip.BINARY) for _ in range(4))
        model += count >= trainer.min_nodes * runs
        model += count <= min(trainer.max_nodes, len(x)) * runs
        model += count - current <= len(x) * up
        model += current - count <= len(x) * down
        mine = case.current.get(trainer.name, frozenset())
        changed = mip.xsum(1 - var if node in mine else var for node, var in x.items())
        model += changed <= count - current + big_m * shrinks
        model += changed <= current - count + big_m * (1 - shrinks)
        points = _breakpoints(trainer, objective)
        weights = [model.add_var(lb=0, ub=1) for _ in points]
        model.add_sos([(w, k) for k, w in enumerate(weights)], 2)
        model += mip.xsum(weights) == 1
        model += mip.xsum(n * w for (n, _), w in zip(points, weights, strict=True)) == count
        throughput = mip.xsum(rate * w for (_, rate), w in zip(points, weights, strict=True))
        before = objective(trainer, current) if current else 0.0
        lasts = horizon if current else horizon - trainer.costs.start
        terms += [lasts * throughput, -trainer.costs.up * before * up, -trainer.costs.down * before * down]
    for variables in taken.values():
        model += mip.xsum(variables) <= 1
    model.objective = mip.xsum(terms)
    started = time.perf_counter()
    status = model.optimize(max_seconds=time_limit)
    seconds = time.perf_counter() - started
    value = float(model.objective_value) if model.num_solutions else None
    nodes = (
        {name: frozenset(node for node, var in x.items() if var.x > 0.5) for name, x in given.items()}
        if (model.num_solutions)
        else {}
    )
    allocation = {name: held for name, held in nodes.items() if held}
    return PublishedSolution(value, seconds, status == mip.OptimizationStatus.OPTIMAL, allocation)


def _breakpoints(trainer: PlannedJob, objective: Objective) -> list[tuple[int, float]]:
    inner = {n for n, _ in trainer.curve.points if trainer.min_nodes < n < trainer.max_nodes}
    counts = sorted({trainer.min_nodes, *inner, trainer.max_nodes})
    return [(0, 0.0), *((n, objective(trainer, n)) for n in counts)]
