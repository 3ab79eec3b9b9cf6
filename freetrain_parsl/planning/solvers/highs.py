"""HiGHS as all models use it: its options, what is tried again if a solve fails, programmes and solutions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import highspy
import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import PlanningError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Programme", "Solution", "is_proven", "make_solver", "solve"]

Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_PROVEN = 1e-9  # relative distance from the bound that counts as zero

_OPTIONS: Mapping[str, bool | float] = MappingProxyType(
    {
        "output_flag": False,
        "threads": 1,
        "mip_rel_gap": 0.0,
        # The models come with a good incumbent and are small: searching for better starts costs more than it saves.
        # Older versions of HiGHS ignore options that they do not know.
        "mip_heuristic_run_feasibility_jump": False,
        "mip_allow_restart": False,
    }
)
_ENDS = frozenset(
    (
        highspy.HighsModelStatus.kOptimal,
        highspy.HighsModelStatus.kObjectiveTarget,
        highspy.HighsModelStatus.kTimeLimit,
    )
)
# All models have a solution, so that a solve that finds none has failed, too.
_NUMERICAL_FAILURES = frozenset(
    (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
        highspy.HighsModelStatus.kPresolveError,
        highspy.HighsModelStatus.kSolveError,
        highspy.HighsModelStatus.kPostsolveError,
        highspy.HighsModelStatus.kUnknown,
        highspy.HighsModelStatus.kNotset,
    )
)


def make_solver(options: Mapping[str, bool | float]) -> highspy.Highs:
    """Return a solver without a model; `options` are set in addition to those that all models have."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call] # highspy has stubs for its core only
    for option, value in {**_OPTIONS, **options}.items():
        solver.setOptionValue(option, value)
    return solver


def solve(solver: highspy.Highs) -> highspy.HighsModelStatus:
    """Solve the solver's model; return how it ended.

    Only if the model has a time limit or a target can it end without an optimum. A solve that fails numerically is
    tried again from scratch in the rest of the time limit.

    Raises
    ------
    PlanningError
        It could not be solved.
    """
    limit = solver.getOptions().time_limit
    deadline = time.perf_counter() + limit
    status = _run(solver, deadline)
    if status in _NUMERICAL_FAILURES and time.perf_counter() < deadline:
        solver.clearSolver()  # it may fail from the basis of an earlier solve
        status = _run(solver, deadline)
    solver.setOptionValue("time_limit", limit)
    if status not in _ENDS:
        raise PlanningError(f"HiGHS could not solve the allocation: {solver.modelStatusToString(status)}")
    return status


def _run(solver: highspy.Highs, deadline: float) -> highspy.HighsModelStatus:
    if _run_once(solver, deadline) == highspy.HighsStatus.kError:
        # HiGHS has one thread pool per process: other code has started it with a different size.
        solver.setOptionValue("threads", 0)
        _run_once(solver, deadline)
    return solver.getModelStatus()


def _run_once(solver: highspy.Highs, deadline: float) -> highspy.HighsStatus:
    solver.setOptionValue("time_limit", max(0.0, deadline - time.perf_counter()))  # HiGHS counts each run separately
    return solver.run()


def is_proven(objective: float, bound: float) -> bool:
    """Return whether nothing is better, up to rounding."""
    return bound - objective <= _PROVEN * abs(bound)


@dataclass(frozen=True)
class Solution:
    """Counts and their quality.

    Parameters
    ----------
    counts
        Nodes of each trainer, shape (J,), or of each trainer and class, shape (J, K).
    objective
        Their total value.
    bound
        Upper bound on the value of any counts.
    """

    counts: Counts
    objective: float
    bound: float

    @property
    def is_proven(self) -> bool:
        """Whether no counts are better, up to rounding."""
        return is_proven(self.objective, self.bound)


@dataclass
class Programme:
    """A linear or mixed-integer programme under construction, row-wise, minimising."""

    costs: list[Table] = field(default_factory=list)
    upper: list[Table] = field(default_factory=list)
    integer: list[Counts] = field(default_factory=list)
    columns: int = 0
    offset: float = 0.0
    rows: list[tuple[Counts, Table, float, float]] = field(default_factory=list)

    def add_columns(self, costs: Table, upper: npt.NDArray[Any], *, integer: bool = False) -> int:
        """Add variables from 0 to `upper`; return the index of the first."""
        first = self.columns
        self.costs.append(costs)
        self.upper.append(np.asarray(upper, dtype=float))
        self.integer.append(np.full(len(costs), int(integer)))
        self.columns += len(costs)
        return first

    def add_row(self, columns: Counts, coefficients: Table, lower: float, upper: float) -> None:
        """Add a constraint."""
        self.rows.append((columns, coefficients, lower, upper))

    def run(self, solver: highspy.Highs, start: Table) -> highspy.HighsModelStatus:
        """Solve it, beginning with the values of all variables in `start`."""
        starts = np.cumsum([0, *(len(row[0]) for row in self.rows)])
        solver.passModel(
            self.columns,
            len(self.rows),
            int(starts[-1]),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            self.offset,
            np.concatenate(self.costs),
            np.zeros(self.columns),
            np.concatenate(self.upper),
            np.array([row[2] for row in self.rows], dtype=float),
            np.array([row[3] for row in self.rows], dtype=float),
            starts.astype(np.int32),
            np.concatenate([row[0] for row in self.rows]).astype(np.int32),
            np.concatenate([row[1] for row in self.rows]).astype(float),
            np.concatenate(self.integer).astype(np.int32),
        )
        solution = highspy.HighsSolution()
        solution.col_value = list(start)
        solver.setSolution(solution)
        return solve(solver)
