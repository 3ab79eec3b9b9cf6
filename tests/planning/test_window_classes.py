"""The window-aware model: the value of counts, the best response to prices, and the solver, against enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.solvers.column_generation import maximise_windows
from freetrain_parsl.planning.solvers.pricing import Pricing
from freetrain_parsl.planning.solvers.window_model import WindowInstance, evaluate, trainer_values
from tests.support.exact import best_value, best_window_value, trainer_value

seconds = st.sampled_from([0.0, 1.0, 7.0, 40.0])


@st.composite
def instances(draw, *, startup=None):
    """Make tiny problems with tables of any shape, ties, offered classes and trainers below their minimum."""
    trainers, classes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = np.array(draw(st.lists(st.integers(0, 3), min_size=classes, max_size=classes)))
    offered = np.array(draw(st.lists(st.booleans(), min_size=classes, max_size=classes)))
    current = np.zeros((trainers, classes), dtype=np.int64)
    for k in np.flatnonzero(~offered):
        left = int(sizes[k])
        for j in range(trainers):
            current[j, k] = draw(st.integers(0, left))
            left -= current[j, k]
    top = max(int(sizes.sum()), 1)
    value = st.sampled_from([0.0, 1.0, 2.0, 3.5, 10.0]) | st.floats(0.0, 20.0)
    rates = np.array(draw(st.lists(value, min_size=trainers * (top + 1), max_size=trainers * (top + 1))))
    rates = rates.reshape(trainers, top + 1)
    rates[:, 0] = 0.0
    for row in rates:
        row[draw(st.lists(st.integers(1, top), max_size=2))] = np.nan
    closing = st.sampled_from([5.0, 20.0, 20.5, 50.0, 100.0, 300.0, np.inf])
    shares = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=classes, max_size=classes).map(np.array)
    costs = [np.array(draw(st.lists(seconds, min_size=trainers, max_size=trainers))) for _ in range(4)]
    return WindowInstance(
        rates,
        *costs,
        current,
        sizes,
        np.array(draw(st.lists(closing, min_size=classes, max_size=classes))),
        horizon=draw(st.sampled_from([10.0, 100.0])),
        shares=draw(st.none() | shares),
        offered=offered,
        startup=draw(st.sampled_from([0.0, 3.0, 20.0, 30.0, 150.0])) if startup is None else startup,
        min_useful=draw(st.sampled_from([0.0, 10.0])),
        max_blocks=draw(st.sampled_from([None, 0, 1])),
        moving=draw(st.none() | st.lists(seconds, min_size=trainers, max_size=trainers).map(np.array)),
    )


def choices_of(capacities):
    return np.array(list(itertools.product(*(range(n + 1) for n in capacities.tolist()))))


@given(instances())
@settings(deadline=None, max_examples=150)
def test_values_equal_the_formula(case):
    choices = choices_of(case.capacities)
    for j in range(len(case.rates)):
        expected = [trainer_value(case, j, choice) for choice in choices.tolist()]
        assert trainer_values(case, np.full(len(choices), j), choices) == pytest.approx(expected)


@pytest.mark.slow
@given(instances(), st.data())
@settings(deadline=None, max_examples=300)
def test_a_response_is_the_best_one(case, data):
    """Exactly without start-ups; with them its value is no less than the best."""
    trainers, classes = case.current.shape
    price = st.sampled_from([0.0, 1.0, 50.0, 400.0])
    prices = np.array(data.draw(st.lists(price, min_size=classes, max_size=classes)))
    capacities = np.array([data.draw(st.integers(0, n)) for n in case.capacities.tolist()], dtype=np.int64)
    choices = choices_of(capacities)
    values, found = Pricing(case).respond(
        np.arange(trainers), np.tile(prices, (trainers, 1)), np.tile(capacities, (trainers, 1))
    )
    real = trainer_values(case, np.arange(trainers), found) - found @ prices
    for j in range(trainers):
        best = np.max(trainer_values(case, np.full(len(choices), j), choices) - choices @ prices)
        assert np.all(found[j] <= capacities)
        assert values[j] >= best - 1e-9
        assert real[j] <= best + 1e-9
        if not case.startup or not case.is_offered.any() or not found[j][case.is_offered].any():
            assert values[j] == pytest.approx(real[j])
            assert real[j] == pytest.approx(best)


def test_a_block_that_does_not_start_before_the_horizon_costs_nothing_at_its_end():
    """No nodes leave with it: a bound that charged for that would be below the value."""
    case = WindowInstance(
        np.array([[0.0, 1.0, 1.0]]),
        *np.array([[0.0], [1.0], [0.0], [0.0]]),
        current=np.array([[0, 1]]),
        sizes=np.array([1, 1]),
        closings=np.array([20.5, 5.0]),
        horizon=10.0,
        shares=np.array([0.1, 0.0]),
        offered=np.array([True, False]),
        startup=20.0,
    )
    values, _ = Pricing(case).respond(np.array([0]), np.zeros((1, 2)), np.array([[1, 0]]))
    assert values[0] >= trainer_value(case, 0, [1, 0]) == 0.0


@pytest.mark.slow
@given(instances())
@settings(deadline=None, max_examples=200)
def test_the_solution_is_near_the_optimum_and_the_bound_is_true(case):
    """Without start-ups the reported gap is exact; with them the bound is still valid."""
    solution = maximise_windows(case, time_limit=20, gap=0.0)
    best = best_window_value(case)
    noise = 1e-9 * max(1.0, abs(best))
    assert case.feasible(solution.counts)
    assert solution.objective == pytest.approx(evaluate(case, solution.counts))
    assert solution.objective <= best + noise
    assert solution.bound >= best - noise
    assert solution.objective >= evaluate(case, case.status_quo) - noise


def test_a_solution_that_is_proven_optimal_by_later_prices_is_returned():
    """There is no room for better columns then, and their costs cannot be scaled by it."""
    case = WindowInstance(
        np.array([[0.0, 0.0, 8.0, 0.0], [0.0, 0.0, 1.0, 0.0]]),
        up=np.array([0.0, 0.0]),
        down=np.array([1.0, 7.0]),
        start=np.array([40.0, 0.0]),
        checkpoint=np.array([1.0, 1.0]),
        current=np.array([[0, 0], [0, 2]]),
        sizes=np.array([1, 2]),
        closings=np.array([100.0, 100.0]),
        horizon=100.0,
        shares=np.array([0.0, 0.1]),
        offered=np.array([True, False]),
        startup=3.0,
        min_useful=0.0,
        max_blocks=0,
    )
    solution = maximise_windows(case, time_limit=20, gap=0.0)
    assert solution.objective == pytest.approx(best_window_value(case))


@given(instances(startup=0.0), st.sampled_from([0.0, 0.01, 0.1]))
@settings(deadline=None, max_examples=100)
def test_one_class_that_never_closes_is_the_count_model(case, gap):
    one = replace(
        case,
        sizes=case.sizes[:1],
        current=case.current[:, :1],
        closings=np.array([np.inf]),
        shares=None,
        offered=np.array([False]),
    )
    values = case.horizon * one.rates[:, : int(one.sizes[0]) + 1]
    for j, held in enumerate(one.totals.tolist()):
        values[j, held + 1 :] -= one.up[j] * one.before[j]
        values[j, :held] -= one.down[j] * one.before[j]
        if one.moved is not None:
            moved = np.delete(np.arange(values.shape[1]), held)
            values[j, moved] -= one.moved[j, moved] * one.before[j]
        if held == 0:
            values[j] -= one.start[j] * one.rates[j, : values.shape[1]]
    best = best_value(np.where(np.isnan(values), -np.inf, values))
    solution = maximise_windows(one, time_limit=20, gap=gap)
    noise = 1e-9 * max(1.0, abs(best))
    assert solution.bound >= best - noise
    assert solution.objective <= best + noise
    assert solution.bound - solution.objective <= gap * abs(solution.bound) + noise
    assert best_window_value(one) == pytest.approx(best)


@given(instances(), st.data())
@settings(deadline=None, max_examples=100)
def test_classes_of_the_same_end_are_merged_and_divided_without_loss(case, data):
    small, number = case.merged()
    trainers, classes = small.current.shape
    counts = np.zeros((trainers, classes), dtype=np.int64)
    for k in range(classes):
        left = int(small.capacities[k])
        for j in range(trainers):
            counts[j, k] = data.draw(st.integers(0, left))
            left -= int(counts[j, k])
    divided = case.divided(counts, number)
    values = trainer_values(small, np.arange(trainers), counts)
    assert trainer_values(case, np.arange(trainers), divided) == pytest.approx(values)
    assert np.all(divided.sum(axis=0) <= case.capacities)
    assert best_window_value(small) == pytest.approx(best_window_value(case))


def like_a_week(seed, trainers, nodes, classes, *, offered=0.0):
    """Make a problem of a given size: trainers that scale to 64 nodes, and windows of seconds to hours."""
    rng = np.random.default_rng(seed)
    gains = np.cumprod(rng.uniform(1.55, 1.98, (trainers, 7)), axis=1)
    counts = np.arange(min(64, nodes) + 1)
    rates = np.stack([np.interp(counts, [0, *2 ** np.arange(7)], [0, *row]) for row in gains])
    sizes = 1 + rng.multinomial(nodes - classes, rng.dirichlet(np.ones(classes)))
    windows = rng.random(classes) < offered
    current = np.zeros((trainers, classes), dtype=np.int64)
    for j in range(trainers // 2):
        k = int(rng.integers(classes))
        if not windows[k]:
            current[j, k] = rng.integers(0, min(sizes[k] - current[:, k].sum(), 64) + 1)
    return WindowInstance(
        rates,
        np.full(trainers, 18.0),
        np.full(trainers, 12.0),
        np.full(trainers, 10.0),
        np.full(trainers, 1.0),
        current,
        sizes,
        np.exp(rng.uniform(np.log(10), np.log(10_000), classes)),
        horizon=600.0,
        offered=windows,
        startup=20.0 * bool(offered),
        max_blocks=2 if offered else None,
    )


@pytest.mark.parametrize("seed", range(4))
def test_comes_close_to_the_bound_quickly(seed):
    case = like_a_week(seed, 10, 128, 6)
    solution = maximise_windows(case, time_limit=10, gap=0.015)
    assert case.feasible(solution.counts)
    assert solution.bound - solution.objective <= 0.015 * solution.bound


def test_offered_classes_are_used_within_the_limit():
    case = like_a_week(3, 10, 128, 8, offered=0.5)
    solution = maximise_windows(case, time_limit=10, gap=0.01)
    assert case.feasible(solution.counts)
    assert 0 < np.count_nonzero(solution.counts.sum(axis=0)[case.is_offered]) <= 2
    without = maximise_windows(replace(case, max_blocks=0), time_limit=10, gap=0.01)
    assert without.objective < solution.objective


@pytest.mark.parametrize("seed", range(8))
def test_one_block_is_one_block_for_trainers_that_want_many(seed):
    """Small windows and trainers that gain nothing from a single one."""
    case = like_a_week(seed, 4, 40, 8, offered=1.0)
    wanting = np.where(np.arange(case.rates.shape[1]) < 12, 0.01 * case.rates, case.rates)
    case = replace(case, rates=wanting, startup=0.0, max_blocks=1 + seed % 2)
    assert case.feasible(maximise_windows(case, time_limit=10).counts)


def test_is_deterministic():
    case = like_a_week(0, 12, 100, 7)
    first, second = (maximise_windows(case, time_limit=60) for _ in range(2))
    assert np.array_equal(first.counts, second.counts)
    assert first.objective == second.objective


def test_without_time_the_incumbent_is_kept_under_a_true_bound():
    case = like_a_week(1, 10, 128, 6)
    good = maximise_windows(case, time_limit=10)
    again = maximise_windows(case, good.counts, time_limit=0.0)
    assert again.objective >= good.objective
    assert again.bound >= good.objective


def test_an_incumbent_that_is_not_feasible_is_refused():
    case = like_a_week(1, 10, 128, 6)
    with pytest.raises(PlanningError, match="incumbent"):
        maximise_windows(case, np.full((10, 6), 100))


def test_no_trainers_and_no_nodes():
    case = like_a_week(1, 10, 128, 6)
    empty = replace(case, current=0 * case.current, sizes=0 * case.sizes)
    assert maximise_windows(empty).objective == 0.0
    alone = replace(
        case,
        rates=case.rates[:0],
        current=case.current[:0],
        **dict.fromkeys(("up", "down", "start", "checkpoint"), case.up[:0]),
    )
    assert maximise_windows(alone).counts.shape == (0, 6)


@pytest.mark.parametrize(
    "wrong",
    [{"horizon": 0.0}, {"closings": np.zeros(6)}, {"sizes": np.zeros(6, dtype=np.int64)}, {"up": np.zeros(3)}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_problem_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(PlanningError, match="window model"):
        replace(like_a_week(1, 10, 128, 6), **wrong)
