"""HiGHS as all models use it: its options, and what is tried again if a solve fails."""

from __future__ import annotations

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


def make_solver(options: Mapping[str, bool | float]) -> highspy.Highs:
    """Return a solver without a model; `options` are set in addition to those that all models have."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call] # highspy has stubs for its core only
    for option, value in {**_OPTIONS, **options}.items():
        solver.setOptionValue(option, value)
    return solver


def solve(solver: highspy.Highs) -> highspy.HighsModelStatus:
    """Solve the solver's model, if necessary a second time from scratch; return how it ended.

    Only if the model has a time limit or a target can it end without an optimum.

    Raises
    ------
    PlanningError
        It could not be solved.
    """
    status = _run(solver)
    if status not in _ENDS:
        solver.clearSolver()  # it may fail from the basis of an earlier solve
        status = _run(solver)
    if status not in _ENDS:
        raise PlanningError(f"HiGHS could not solve the allocation: {solver.modelStatusToString(status)}")
    return status


def _run(solver: highspy.Highs) -> highspy.HighsModelStatus:
    if solver.run() == highspy.HighsStatus.kError:
        # HiGHS has one thread pool per process: other code has started it with a different size.
        solver.setOptionValue("threads", 0)
        solver.run()
    return solver.getModelStatus()
