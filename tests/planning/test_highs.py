"""Solves that fail: tried again from scratch within their time limit, then refused."""

from __future__ import annotations

import time

import highspy
import numpy as np
import pytest

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.solvers.highs import make_solver, solve


class _FailsFromABasis(highspy.Highs):
    """Fails until it starts from scratch."""

    cleared = False

    def getModelStatus(self) -> highspy.HighsModelStatus:  # noqa: N802 - HiGHS's name
        return super().getModelStatus() if self.cleared else highspy.HighsModelStatus.kSolveError

    def clearSolver(self) -> highspy.HighsStatus:  # noqa: N802 - HiGHS's name
        self.cleared = True
        return super().clearSolver()


class _EndsWith(highspy.Highs):
    """Ends its solves with a given status, each after 0.2 s; records their time limits."""

    def __init__(self, status: highspy.HighsModelStatus) -> None:
        super().__init__()
        self.silent()
        self.status = status
        self.limits: list[float] = []

    def run(self) -> highspy.HighsStatus:
        self.limits.append(self.getOptions().time_limit)
        time.sleep(0.2)
        return highspy.HighsStatus.kOk

    def getModelStatus(self) -> highspy.HighsModelStatus:  # noqa: N802 - HiGHS's name
        return self.status


def add_model(solver: highspy.Highs, least: float) -> None:
    """Minimise x, between 0 and 1 and at least `least`."""
    none = np.empty(0, dtype=np.int32)
    solver.addCol(1.0, 0.0, 1.0, 0, none, np.empty(0))
    solver.addRow(least, np.inf, 1, np.zeros(1, dtype=np.int32), np.ones(1))


def test_a_solve_that_fails_from_a_basis_is_tried_again_from_scratch() -> None:
    solver = _FailsFromABasis()
    solver.silent()
    add_model(solver, 0.5)
    assert solve(solver) == highspy.HighsModelStatus.kOptimal
    assert solver.getInfo().objective_function_value == 0.5


def test_both_attempts_share_the_time_limit() -> None:
    solver = _EndsWith(highspy.HighsModelStatus.kSolveError)
    solver.setOptionValue("time_limit", 10.0)
    with pytest.raises(PlanningError, match="Solve error"):
        solve(solver)
    first, second = solver.limits
    assert first == pytest.approx(10.0, abs=0.1)
    assert 0.0 < second <= 9.8
    assert solver.getOptions().time_limit == 10.0, "the limit of the next solve"


def test_a_failed_solve_without_time_left_is_not_tried_again() -> None:
    solver = _EndsWith(highspy.HighsModelStatus.kSolveError)
    solver.setOptionValue("time_limit", 0.1)
    with pytest.raises(PlanningError, match="Solve error"):
        solve(solver)
    assert len(solver.limits) == 1


@pytest.mark.parametrize("status", ["kInterrupt", "kMemoryLimit", "kIterationLimit", "kModelError", "kUnbounded"])
def test_a_solve_that_did_not_fail_numerically_is_not_tried_again(status: str) -> None:
    solver = _EndsWith(getattr(highspy.HighsModelStatus, status))
    with pytest.raises(PlanningError):
        solve(solver)
    assert len(solver.limits) == 1


def test_a_solve_that_reached_its_time_limit_is_not_tried_again() -> None:
    solver = _EndsWith(highspy.HighsModelStatus.kTimeLimit)
    assert solve(solver) == highspy.HighsModelStatus.kTimeLimit
    assert len(solver.limits) == 1


def test_a_model_without_a_solution_is_refused() -> None:
    solver = make_solver({})
    add_model(solver, 2.0)
    with pytest.raises(PlanningError, match="HiGHS could not solve the allocation: Infeasible"):
        solve(solver)


def test_options_of_a_model_are_added_to_those_of_all() -> None:
    solver = make_solver({"time_limit": 7.0})
    assert (solver.getOptions().threads, solver.getOptions().time_limit) == (1, 7.0)
