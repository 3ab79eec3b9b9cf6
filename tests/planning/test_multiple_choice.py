"""The knapsack over combinations equals complete enumeration, and reports correctly when it runs out of time."""

from __future__ import annotations

import itertools
import time

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.solvers import multiple_choice
from freetrain_parsl.planning.solvers.multiple_choice import NOTHING, fits, maximise_choices, undominated


def used(demands, choices, resources):
    taken = [demands[job][choice] for job, choice in enumerate(choices) if choice != NOTHING]
    return np.sum(taken, axis=0) if taken else np.zeros(resources)


def worth(values, choices):
    return sum(values[job][choice] for job, choice in enumerate(choices) if choice != NOTHING)


def best_of_all(values, demands, capacity):
    """Enumerate all choices."""
    every = itertools.product(*(range(NOTHING, len(table)) for table in values))
    return max(worth(values, choices) for choices in every if fits(used(demands, choices, len(capacity)), capacity))


@st.composite
def problems(draw, *, jobs=4, combinations=4):
    """Draw small problems; demands in tenths, so that sums are rounded, and many values and demands are equal."""
    resources = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0, combinations), min_size=1, max_size=jobs))
    tenths = st.integers(0, 9).map(lambda number: number / 10)
    values = [np.array(draw(st.lists(st.integers(-2, 9), min_size=n, max_size=n)), dtype=float) for n in sizes]
    demands = [
        np.array([draw(st.lists(tenths, min_size=resources, max_size=resources)) for _ in range(n)]).reshape(
            n, resources
        )
        for n in sizes
    ]
    capacity = np.array(
        draw(st.lists(st.integers(0, 20).map(lambda n: n / 10), min_size=resources, max_size=resources))
    )
    return values, demands, capacity


def hard_problem(jobs=40, combinations=60, resources=4, seed=0):
    """Make a problem that takes HiGHS longer than a moment: worth little more than the resources it needs."""
    rng = np.random.default_rng(seed)
    demands = [rng.integers(1, 1000, (combinations, resources)).astype(float) for _ in range(jobs)]
    values = [table.sum(axis=1) + rng.integers(0, 200, combinations) for table in demands]
    return values, demands, np.sum([table.mean(axis=0) for table in demands], axis=0) / 3


@given(problems(), st.sampled_from([1e-290, 1e-9, 1.0, 1e9]))
@settings(max_examples=200, deadline=None)
def test_the_choices_are_optimal_and_the_bound_is_valid(problem, unit):
    values, demands, capacity = problem
    values = [unit * table for table in values]
    solution = maximise_choices(values, demands, capacity)
    best = best_of_all(values, demands, capacity)
    assert solution.objective == pytest.approx(best, abs=1e-9 * unit)
    assert solution.objective == pytest.approx(worth(values, solution.choices), abs=1e-9 * unit)
    assert fits(used(demands, solution.choices, len(capacity)), capacity)
    assert best - 1e-6 * unit <= solution.bound <= best + 1e-6 * unit


@given(problems(), st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=100, deadline=None)
def test_with_a_gap_the_bound_is_valid_and_no_farther_than_that(problem, gap):
    values, demands, capacity = problem
    solution = maximise_choices(values, demands, capacity, gap=gap)
    assert best_of_all(values, demands, capacity) <= solution.bound + 1e-6
    assert solution.objective >= (1 - gap) * solution.bound - 1e-6


@given(problems(jobs=1, combinations=12))
@settings(max_examples=100, deadline=None)
def test_dropping_dominated_combinations_keeps_what_each_capacity_is_worth(problem):
    [values], [demands], capacity = problem
    kept = undominated(values, demands)
    for some in (capacity, capacity / 2, demands.max(axis=0, initial=0.0)):
        here = values[fits(demands, some)].max(initial=0.0)
        assert values[kept][fits(demands[kept], some)].max(initial=0.0) == here


@given(problems(jobs=1, combinations=12))
@settings(max_examples=100, deadline=None)
def test_no_combination_that_is_kept_is_dominated_by_another(problem):
    [values], [demands], _ = problem
    kept = undominated(values, demands)
    assert list(kept) == sorted(set(kept))
    for one, other in itertools.permutations(kept, 2):
        assert values[other] < values[one] or np.any(demands[other] > demands[one])


def test_of_equal_combinations_the_first_is_kept():
    assert undominated(np.array([1.0, 2.0, 2.0]), np.array([[1.0], [1.0], [1.0]])).tolist() == [1]


@pytest.fixture(scope="module")
def hard():
    """Make a problem that HiGHS does not finish in a moment, and choices that it found in one second."""
    problem = hard_problem()
    return problem, maximise_choices(*problem, time_limit=1.0)


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.5])
def test_the_time_limit_is_kept_with_choices_that_fit_and_a_valid_bound(hard, limit):
    (values, demands, capacity), good = hard
    started = time.perf_counter()
    solution = maximise_choices(values, demands, capacity, time_limit=limit)
    assert time.perf_counter() - started < limit + 1.0
    assert fits(used(demands, solution.choices, len(capacity)), capacity)
    assert 0 < solution.objective < solution.bound
    assert good.objective <= solution.bound


@given(problems(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_result_is_never_worth_less_than_the_incumbent(problem, random):
    values, demands, capacity = problem
    incumbent = np.full(len(values), NOTHING)
    for job, table in enumerate(values):
        tried = incumbent.copy()
        tried[job] = random.randrange(NOTHING, len(table))
        if fits(used(demands, tried, len(capacity)), capacity):
            incumbent = tried
    solution = maximise_choices(values, demands, capacity, incumbent=incumbent, time_limit=0.0)
    assert solution.objective >= worth(values, incumbent) - 1e-9
    assert fits(used(demands, solution.choices, len(capacity)), capacity)


def test_the_solver_starts_from_the_incumbent(hard, monkeypatch):
    started = []
    set_solution = highspy.Highs.setSolution

    def remember(solver, solution):
        started.append(sum(solution.col_value))
        solver.setOptionValue("time_limit", 0.1)  # from here on: what comes before takes long on a busy machine
        return set_solution(solver, solution)

    monkeypatch.setattr(highspy.Highs, "setSolution", remember)
    (values, demands, capacity), good = hard
    again = maximise_choices(values, demands, capacity, incumbent=good.choices, time_limit=60.0)
    assert started == [np.count_nonzero(good.choices != NOTHING)], "all choices of the incumbent"
    assert again.objective >= good.objective


def test_a_solution_within_the_solvers_tolerance_only_is_not_taken(monkeypatch):
    """If HiGHS' solution exceeds a capacity, the incumbent stays."""
    values, demands, capacity = hard_problem(jobs=10, combinations=8)
    monkeypatch.setattr(multiple_choice, "_solve", lambda *_: (np.array([0] * 10), np.inf))
    solution = maximise_choices(values, demands, capacity)
    assert not fits(used(demands, [0] * 10, 4), capacity)
    assert fits(used(demands, solution.choices, 4), capacity)


def test_enough_for_all_needs_no_solver(monkeypatch):
    monkeypatch.setattr(multiple_choice, "make_solver", lambda _: pytest.fail("a solver was made"))
    values, demands = [np.array([1.0, 3.0]), np.array([2.0])], [np.array([[1.0], [2.0]]), np.array([[1.0]])]
    solution = maximise_choices(values, demands, np.array([3.0]))
    assert (solution.choices.tolist(), solution.objective, solution.bound) == ([1, 0], 5.0, 5.0)


def test_sums_that_equal_the_capacity_except_for_rounding_fit():
    tenths = [np.array([[0.1]]), np.array([[0.2]]), np.array([[0.7]])]
    values = [np.array([1.0])] * 3
    solution = maximise_choices(values, tenths, np.array([0.3]))
    assert solution.choices.tolist() == [0, 0, NOTHING]


def test_values_that_vanish_are_worth_nothing():
    values, demands = [np.array([5e-324])] * 2, [np.array([[1.0]])] * 2
    assert maximise_choices(values, demands, np.array([1.0])).objective == 0.0


def test_no_jobs_and_no_combinations_are_worth_nothing():
    assert maximise_choices([], [], np.array([1.0])).objective == 0.0
    solution = maximise_choices([np.empty(0)], [np.empty((0, 2))], np.array([1.0, 0.0]))
    assert (solution.choices.tolist(), solution.objective, solution.bound) == ([NOTHING], 0.0, 0.0)


@pytest.mark.parametrize(
    ("values", "demands", "capacity", "problem"),
    [
        ([[1.0]], [], [1.0], "1 jobs have values, 0 have demands"),
        ([[1.0]], [[[1.0, 2.0]]], [1.0], "job 0 has values"),
        ([[np.nan]], [[[1.0]]], [1.0], "not finite"),
        ([[1.0]], [[[-1.0]]], [1.0], "negative demands"),
        ([[1.0]], [[[1.0]]], [-1.0], "capacities must be zero or more"),
    ],
)
def test_inconsistent_problems_are_refused(values, demands, capacity, problem):
    with pytest.raises(PlanningError, match=problem):
        maximise_choices([np.array(v) for v in values], [np.array(d) for d in demands], np.array(capacity))


@pytest.mark.parametrize("incumbent", [[0, 0], [2, NOTHING], [0]])
def test_an_incumbent_that_does_not_fit_is_refused(incumbent):
    values, demands = [np.array([1.0])] * 2, [np.array([[1.0]])] * 2
    with pytest.raises(PlanningError, match="the incumbent does not fit"):
        maximise_choices(values, demands, np.array([1.0]), incumbent=np.array(incumbent))
