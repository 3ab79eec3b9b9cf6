"""HiGHS as all models use it: its options, and what is tried again if a solve fails."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING

import highspy

from freetrain_parsl.errors import PlanningError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["make_solver", "solve"]

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
