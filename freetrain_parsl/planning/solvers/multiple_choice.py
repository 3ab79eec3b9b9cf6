"""Choose at most one combination of resources per job at the highest total value: exact, in HiGHS.

::

    max  sum_jc v_jc x_jc      subject to      sum_c x_jc <= 1  for every job j,
                                               sum_jc d_jcr x_jc <= C_r  for every resource r,      x binary

This is the multiple-choice multi-dimensional knapsack problem (Kellerer, Pferschy & Pisinger, *Knapsack Problems*,
2004, chapters 9 and 11).

1. A combination that does not fit alone, has no value, or needs at least as much of everything as another one of its
   job that is worth at least as much (a dominated one) is dropped.
2. The duals L of the linear relaxation's resource rows bound the optimum from above: ``L C + sum_j max(0, max_c (v_jc -
   L d_jc))``. This holds for any L of zero or more, so that the solver's tolerances do not matter.
3. Jobs in order of their best value at these prices get the best combination that still fits, and then the most
   valuable one that does: an incumbent, which competes with the caller's.
4. A combination is in no better solution if its regret at these prices exceeds the gap (reduced-cost fixing). The rest
   is solved as a mixed-integer programme, starting from the incumbent.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import highspy
import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.solvers.highs import make_solver, solve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NOTHING", "ChoiceSolution", "fits", "maximise_choices", "undominated"]

Table = npt.NDArray[np.float64]
Choices = npt.NDArray[np.int64]

NOTHING = -1
"""The choice of a job that gets nothing."""

_TOLERANCE = 1e-9  # of a capacity: sums of fractional demands are rounded
_CLOSED = 1e-12  # of the bound: a smaller gap counts as zero
_WORTHLESS = 1e-300  # smaller values count as zero: they cannot be scaled
_LARGEST = 1000.0  # value of a combination in the solver's objective: its tolerances are absolute


@dataclass(frozen=True)
class ChoiceSolution:
    """Choices and their quality.

    Parameters
    ----------
    choices
        Combination of each job, by its position in the job's table, or `NOTHING`; shape (J,).
    objective
        Their total value.
    bound
        Upper bound on the total value of any choices.
    """

    choices: Choices
    objective: float
    bound: float


def maximise_choices(
    values: Sequence[Table],
    demands: Sequence[Table],
    capacity: Table,
    *,
    incumbent: Choices | None = None,
    time_limit: float = 10.0,
    gap: float = 0.0,
) -> ChoiceSolution:
    """Find choices of the highest total value that fit the capacity together.

    Parameters
    ----------
    values
        v_jc, one array of shape (C_j,) per job.
    demands
        d_jcr, one array of shape (C_j, R) per job.
    capacity
        C_r, shape (R,).
    incumbent
        Choices that fit; the result is never worth less. ``None``: nothing for all jobs.
    time_limit
        Seconds after which the best choices so far are returned, with a bound. The solver checks it between steps.
    gap
        Stop at this distance from the bound, relative to it.

    Raises
    ------
    PlanningError
        Inconsistent shapes, values or demands that are not finite, negative demands or capacities, an incumbent that
        does not fit, or the solver failed.
    """
    deadline = time.perf_counter() + time_limit
    _check(values, demands, capacity)
    problem = _Problem(values, demands, capacity)
    best = problem.nothing if incumbent is None else incumbent
    if not problem.feasible(best):
        raise PlanningError(f"choices: the incumbent does not fit, or is of other jobs: {best.tolist()}")
    columns = _Columns.of(problem)
    peaks = columns.best_of_each_job(problem)
    ceiling = problem.worth(peaks)
    if problem.feasible(peaks):
        # There is enough for all: without the capacities the problem has the same optimum.
        return ChoiceSolution(peaks, ceiling, ceiling)
    price = _prices(problem, columns, max(deadline - time.perf_counter(), 0.0))
    filled = _fill(problem, columns, np.zeros(len(capacity)) if price is None else price)
    best = max(best, filled, key=problem.worth)
    if price is None:
        return ChoiceSolution(best, problem.worth(best), ceiling)
    bound, regrets = _bound(problem, columns, price)
    missing = bound - problem.worth(best)
    if missing > max(gap, _CLOSED) * bound:
        # Combinations with a larger regret are in no better solution.
        core = columns.take(regrets <= missing + _TOLERANCE * bound)
        found, core_bound = _solve(problem, core, best, gap, max(deadline - time.perf_counter(), 0.0))
        if problem.feasible(found):  # the solver's tolerance is wider than ours
            best = max(best, found, key=problem.worth)
        bound = min(bound, core_bound)
    return ChoiceSolution(best, problem.worth(best), max(bound, problem.worth(best)))


def undominated(values: Table, demands: Table) -> Choices:
    """Return which combinations of one job no other one replaces at no loss, in ascending order.

    One replaces another if it is worth at least as much and needs at most as much of every resource. Of equal ones the
    first is kept.

    Parameters
    ----------
    values
        Shape (C,).
    demands
        Shape (C, R).
    """
    order = np.lexsort((np.arange(len(values)), demands.sum(axis=1), -values))
    kept: list[int] = []
    for row in order:
        # Whatever dominates it comes first in this order.
        if not np.any(np.all(demands[kept] <= demands[row], axis=1)):
            kept.append(int(row))
    return np.array(sorted(kept), dtype=np.int64)


def fits(demands: Table, capacity: Table) -> npt.NDArray[np.bool_]:
    """Return whether demands of shape (..., R) are within the capacity, except for rounding; shape (...)."""
    within: npt.NDArray[np.bool_] = np.all(demands <= capacity * (1 + _TOLERANCE), axis=-1)
    return within


def _check(values: Sequence[Table], demands: Sequence[Table], capacity: Table) -> None:
    if len(values) != len(demands):
        raise PlanningError(f"choices: {len(values)} jobs have values, {len(demands)} have demands")
    for job, (worth, needs) in enumerate(zip(values, demands, strict=True)):
        if needs.shape != (*worth.shape, len(capacity)) or worth.ndim != 1:
            raise PlanningError(f"choices: job {job} has values {worth.shape} and demands {needs.shape}")
        if not (np.isfinite(worth).all() and np.isfinite(needs).all() and np.all(needs >= 0)):
            raise PlanningError(f"choices: job {job} has values that are not finite, or negative demands")
    if not (np.isfinite(capacity).all() and np.all(capacity >= 0)):
        raise PlanningError(f"choices: capacities must be zero or more, got {capacity.tolist()}")


@dataclass(frozen=True, eq=False)
class _Problem:
    """The problem as it was given; see `maximise_choices`."""

    values: Sequence[Table]
    demands: Sequence[Table]
    capacity: Table

    @property
    def nothing(self) -> Choices:
        return np.full(len(self.values), NOTHING)

    def worth(self, choices: Choices) -> float:
        """Return the total value of choices."""
        return math.fsum(float(self.values[job][choices[job]]) for job in np.flatnonzero(choices != NOTHING).tolist())

    def feasible(self, choices: Choices) -> bool:
        """Return whether choices exist and fit together."""
        if len(choices) != len(self.values):
            return False
        used = np.zeros(len(self.capacity))
        for job in np.flatnonzero(choices != NOTHING).tolist():
            if not 0 <= choices[job] < len(self.values[job]):
                return False
            used += self.demands[job][choices[job]]
        return bool(fits(used, self.capacity))


@dataclass(frozen=True, eq=False)
class _Columns:
    """Combinations of all jobs that may be chosen: the columns of the programme.

    Parameters
    ----------
    jobs, choices
        Job of each combination, ascending, and its position in the job's table, shape (N,).
    values, demands
        Shapes (N,) and (N, R).
    """

    jobs: Choices
    choices: Choices
    values: Table
    demands: Table

    @classmethod
    def of(cls, problem: _Problem) -> _Columns:
        """Take the combinations that fit alone, are worth something, and are not dominated."""
        rows = []
        for values, demands in zip(problem.values, problem.demands, strict=True):
            some = np.flatnonzero((values > _WORTHLESS) & fits(demands, problem.capacity))
            rows.append(some[undominated(values[some], demands[some])])
        kept = list(zip(problem.values, problem.demands, rows, strict=True))
        return cls(
            np.repeat(np.arange(len(rows)), [len(some) for some in rows]),
            np.concatenate([*rows, np.empty(0, dtype=np.int64)]),
            np.concatenate([*(values[some] for values, _, some in kept), np.empty(0)]),
            np.concatenate([*(demands[some] for _, demands, some in kept), np.empty((0, len(problem.capacity)))]),
        )

    @property
    def unit(self) -> float:
        """One unit of the solver's objective, as a value."""
        return float(self.values.max()) / _LARGEST

    def take(self, which: npt.NDArray[np.bool_]) -> _Columns:
        return _Columns(self.jobs[which], self.choices[which], self.values[which], self.demands[which])

    def chosen(self, problem: _Problem, which: Choices) -> Choices:
        """Return the choices that a set of columns stands for."""
        choices = problem.nothing
        choices[self.jobs[which]] = self.choices[which]
        return choices

    def best_of_each_job(self, problem: _Problem) -> Choices:
        """Return every job's most valuable combination, whether or not they fit together."""
        # Of several columns of a job, the last one that is written stays.
        return self.chosen(problem, np.argsort(self.values, kind="stable"))


_OPTIONS: Mapping[str, bool | float] = MappingProxyType(
    {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
)


def _pass_model(solver: highspy.Highs, problem: _Problem, columns: _Columns, *, integer: bool) -> None:
    """Write the programme: a row for each job, then one for each resource as a share of its capacity."""
    jobs, resources, number = len(problem.values), len(problem.capacity), len(columns.values)
    shares = columns.demands / np.where(problem.capacity > 0, problem.capacity, 1.0)
    rows = np.hstack([columns.jobs[:, None], np.broadcast_to(jobs + np.arange(resources), (number, resources))])
    solver.passModel(
        number,
        jobs + resources,
        rows.size,
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMaximize),
        0.0,
        columns.values / columns.unit,
        np.zeros(number),
        np.ones(number),
        np.full(jobs + resources, -np.inf),
        np.concatenate([np.ones(jobs), (problem.capacity > 0).astype(np.float64)]),
        np.arange(0, rows.size + 1, 1 + resources, dtype=np.int32),
        rows.ravel().astype(np.int32),
        np.hstack([np.ones((number, 1)), shares]).ravel(),
        np.full(number, int(integer), dtype=np.int32),
    )


def _prices(problem: _Problem, columns: _Columns, time_limit: float) -> Table | None:
    """Return the duals of the capacities in the linear relaxation; ``None`` if the time limit was reached."""
    solver = make_solver({**_OPTIONS, "time_limit": time_limit})
    _pass_model(solver, problem, columns, integer=False)
    if solve(solver) != highspy.HighsModelStatus.kOptimal:
        return None
    duals = columns.unit * np.abs(np.asarray(solver.getSolution().row_dual)[len(problem.values) :])
    prices: Table = np.where(problem.capacity > 0, duals / np.where(problem.capacity > 0, problem.capacity, 1.0), 0.0)
    return prices


def _bound(problem: _Problem, columns: _Columns, price: Table) -> tuple[float, Table]:
    """Return the bound at these prices, and by how much it falls if a combination is chosen, shape (N,)."""
    reduced = columns.values - columns.demands @ price
    tops = np.zeros(len(problem.values))
    np.maximum.at(tops, columns.jobs, reduced)
    return float(problem.capacity @ price + tops.sum()), tops[columns.jobs] - reduced


def _fill(problem: _Problem, columns: _Columns, price: Table) -> Choices:
    """Give to one job after another, best value at these prices first, and then use what is left."""
    choices, left = problem.nothing, problem.capacity.copy()
    reduced = columns.values - columns.demands @ price
    tops = np.full(len(problem.values), -np.inf)
    np.maximum.at(tops, columns.jobs, reduced)
    for worth in (reduced, columns.values):
        for job in np.argsort(-tops, kind="stable").tolist():
            mine = np.flatnonzero(columns.jobs == job)
            if choices[job] != NOTHING:
                left += problem.demands[job][choices[job]]
            there = mine[fits(columns.demands[mine], left)]
            if len(there):
                best = there[np.argmax(worth[there])]
                choices[job] = columns.choices[best]
            if choices[job] != NOTHING:
                left -= problem.demands[job][choices[job]]
    return choices


def _solve(
    problem: _Problem, columns: _Columns, incumbent: Choices, gap: float, time_limit: float
) -> tuple[Choices, float]:
    """Solve the programme over some columns from an incumbent; return the choices and the solver's bound."""
    if not len(columns.values):
        return incumbent, problem.worth(incumbent)
    solver = make_solver({**_OPTIONS, "time_limit": time_limit, "mip_rel_gap": gap})
    _pass_model(solver, problem, columns, integer=True)
    start = highspy.HighsSolution()
    start.col_value = list((columns.choices == incumbent[columns.jobs]).astype(np.float64))
    solver.setSolution(start)
    solve(solver)
    info = solver.getInfo()
    bound = columns.unit * info.mip_dual_bound  # infinity if there was no time for one
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return incumbent, bound
    taken = np.flatnonzero(np.asarray(solver.getSolution().col_value) > 0.5)
    return columns.chosen(problem, taken), bound
