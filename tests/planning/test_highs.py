"""Solves that fail: tried again from scratch, then refused."""

from __future__ import annotations

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


def test_a_model_without_a_solution_is_refused() -> None:
    solver = make_solver({})
    add_model(solver, 2.0)
    with pytest.raises(PlanningError, match="HiGHS could not solve the allocation: Infeasible"):
        solve(solver)


def test_options_of_a_model_are_added_to_those_of_all() -> None:
    solver = make_solver({"time_limit": 7.0})
    assert (solver.getOptions().threads, solver.getOptions().time_limit) == (1, 7.0)
