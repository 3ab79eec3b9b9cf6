"""The optimal policy equals a dynamic programme on every instance, and reports correctly when it runs out of time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import resolve_objective
from freetrain_parsl.planning.policies import MilpPolicy, milp
from freetrain_parsl.planning.solvers import counts as count_model
from freetrain_parsl.planning.solvers.counts import least_regret, maximise_counts
from freetrain_parsl.testing.instances import Instance, random_instance
from tests.support.exact import best_value, value
from tests.support.instances import measured_like_instance

T = 120.0
PATIENT = {"horizon": timedelta(seconds=T), "time_limit": timedelta(minutes=2)}


@pytest.fixture
def with_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let HiGHS solve all that the relaxation does not, as if each core were large."""
    monkeypatch.setattr(count_model, "_MOST_SUMS", 0)


def held(case):
    return {t.name: len(case.current.get(t.name, frozenset()) & case.pool.keys()) for t in case.trainers}


def formula(case, objective, horizon=T):
    """Return v_j(n) term by term, shape (J, N + 1), minus infinity where a count is not allowed."""
    values = np.full((len(case.trainers), len(case.pool) + 1), -np.inf)
    before = held(case)
    for row, trainer in enumerate(case.trainers):
        for n in (0, *filter(trainer.may_have, range(len(case.pool) + 1))):
            values[row, n] = value(objective, trainer, before[trainer.name], n, horizon)
    return values


def assert_optimal(case, objective="speedup"):
    decision = MilpPolicy(objective, **PATIENT).allocate(case.pool, case.trainers, case.current, case.now)
    values = formula(case, resolve_objective(objective))
    best = best_value(values)
    # Costs can cancel gains: the difference is only as exact as the terms.
    noise = 1e-13 * np.abs(values, where=np.isfinite(values), out=np.zeros_like(values)).max(axis=1).sum()
    counts = [decision.counts.get(trainer.name, 0) for trainer in case.trainers]
    exactly = pytest.approx(best, rel=1e-9, abs=noise)
    assert sum(counts) <= len(case.pool)
    assert values[np.arange(len(counts)), counts].sum() == exactly
    assert decision.objective == exactly
    assert decision.bound == exactly
    assert decision.proven_optimal
    return decision


rate = st.floats(0.01, 1e4) | st.sampled_from([0.0, 1.0, 2.0])


@st.composite
def instances(draw):
    """Make instances with arbitrary curves, costs and counts."""
    size = draw(st.integers(1, 12))
    trainers, current, used = [], {}, 0
    for index in range(draw(st.integers(1, 5))):
        low = draw(st.integers(1, 6))
        counts = draw(st.lists(st.integers(low, 16), max_size=4, unique=True))
        rates = draw(st.lists(rate, min_size=len(counts) + 1, max_size=len(counts) + 1))
        costs = draw(st.tuples(*[st.sampled_from([0.0, 1.0, 30.0, 5000.0])] * 3))
        trainer = PlannedJob(
            f"t{index}",
            low,
            low + draw(st.integers(0, 10)),
            ScalingCurve(dict(zip([low, *counts], rates, strict=True))),
            CostsInSeconds(*costs, sharded_bytes=draw(st.sampled_from([0.0, 0.0, 5e9, 1e12]))),
            submitted=float(index),
        )
        # After node failures a trainer may have fewer nodes than its minimum.
        has = draw(st.integers(0, min(trainer.max_nodes, size - used)))
        current[trainer.name] = frozenset(f"n{k:02}" for k in range(used, used + has))
        used += has
        trainers.append(trainer)
    return Instance(Pool(PoolNode(f"n{k:02}") for k in range(size)), tuple(trainers), current)


@pytest.mark.slow
@given(instances(), st.sampled_from(["throughput", "speedup"]))
@settings(deadline=None, max_examples=1000)
def test_equals_the_dynamic_programme(case, objective):
    assert_optimal(case, objective)


def test_an_incumbent_that_rounding_puts_beyond_the_gap_is_still_in_the_core():
    """Ten nodes, one of them idle in the incumbent and useless; found by hypothesis."""
    trainers = (
        PlannedJob("t0", 2, 3, ScalingCurve({2: 4367.682740610747}), CostsInSeconds(down=1), submitted=0),
        PlannedJob("t1", 1, 4, ScalingCurve({1: 4369.616472302348}), CostsInSeconds(down=1), submitted=1),
        PlannedJob("t2", 3, 3, ScalingCurve({3: 0.01}), CostsInSeconds(start=1), submitted=2),
        PlannedJob("t3", 1, 1, ScalingCurve({1: 1.0}), submitted=3),
        PlannedJob("t4", 1, 1, ScalingCurve({1: 1.0}), submitted=4),
    )
    names = [f"n{number:02}" for number in range(10)]
    current = {"t0": frozenset(names[:3]), "t1": frozenset(names[3:7])}
    assert_optimal(Instance(Pool(map(PoolNode, names)), trainers, current), "throughput")


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("objective", ["priority", "speedup", "throughput"])
def test_equals_the_dynamic_programme_on_random_instances(objective, block, request):
    if block % 2:
        request.getfixturevalue("with_highs")
    for seed in range(100 * block, 100 * block + 50):
        case = random_instance(seed)
        if case.trainers:
            assert_optimal(case, objective)


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_dynamic_programme_on_30_trainers_and_512_nodes(seed, request):
    if seed % 2:
        request.getfixturevalue("with_highs")
    assert_optimal(measured_like_instance(seed, trainers=30, nodes=512))


@given(st.lists(st.lists(st.integers(-9, 9), min_size=5, max_size=5), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=200)
def test_the_dynamic_programme_is_right_by_enumeration(rows, data):
    """The solver is correct too, on tables of any shape with many ties."""
    values = np.array(rows, dtype=float)
    for row in values:
        row[data.draw(st.lists(st.integers(1, 4), max_size=3))] = -np.inf
    total = max(
        sum(values[row, n] for row, n in enumerate(counts))
        for counts in itertools.product(range(5), repeat=len(rows))
        if sum(counts) <= 4
    )
    solution = maximise_counts(values, np.zeros(len(rows), dtype=np.int64), time_limit=60)
    assert best_value(values) == total
    assert solution.objective == pytest.approx(total)
    assert solution.bound == pytest.approx(total, abs=1e-9)  # the total may be zero


def alike(many, size, *, low=1, high=64, start=0.0):
    trainers = [
        PlannedJob(
            f"t{many - i:03}",
            low,
            high,
            ScalingCurve.default(),
            CostsInSeconds(start=start),
            submitted=float(i),
        )
        for i in range(many)
    ]
    return Instance(Pool(PoolNode(f"n{i:04}") for i in range(size)), tuple(trainers), {})


@pytest.mark.parametrize("size", [7, 40, 333])
def test_many_equal_trainers_are_no_harder_and_the_first_get_no_fewer(size):
    case = alike(30, size, low=3, start=20.0)
    counts = assert_optimal(case).counts
    given_in_order = [counts.get(trainer.name, 0) for trainer in case.trainers]
    assert given_in_order == sorted(given_in_order, reverse=True)


def test_a_users_function_is_an_objective():
    def saturating(trainer, nodes):
        return 1 - 0.5**nodes

    assert_optimal(alike(5, 12), saturating)


def test_a_convex_objective_goes_to_one():
    counts = assert_optimal(alike(4, 10), lambda trainer, nodes: nodes**2).counts
    assert counts == {"t004": 10}


def test_most_of_the_pool_can_change_hands_in_one_step():
    """The published model does not allow this: its M limits changes to half of the pool."""
    pool = Pool(PoolNode(f"n{i}") for i in range(8))
    curve = ScalingCurve({1: 1.0, 2: 1.9, 8: 2.0})
    trainers = [PlannedJob(f"t{i}", 1, 8, curve, CostsInSeconds(up=1, down=1), submitted=float(i)) for i in range(4)]
    assert_optimal(case := Instance(pool, tuple(trainers), {"t0": frozenset(pool)}))
    decision = MilpPolicy().allocate(case.pool, case.trainers, case.current, 0.0)
    assert decision.counts == {"t0": 2, "t1": 2, "t2": 2, "t3": 2}
    assert decision.allocation["t0"] <= case.current["t0"]


def test_a_change_that_does_not_pay_within_the_horizon_is_not_made():
    pool = Pool([PoolNode("a"), PoolNode("b")])
    trainer = PlannedJob("t", 1, 2, ScalingCurve({1: 10.0, 2: 11.0}), CostsInSeconds(up=15.0))
    counts = [
        MilpPolicy(horizon=timedelta(seconds=s)).allocate(pool, [trainer], {"t": frozenset("a")}, 0.0).counts["t"]
        for s in (149, 151)
    ]
    assert counts == [1, 2]


def test_who_is_below_its_minimum_grows_or_stops():
    pool = Pool(PoolNode(name) for name in "abc")
    broken = PlannedJob("t", 2, 3, ScalingCurve({1: 1.0, 2: 2.0}), CostsInSeconds(up=10, down=10))
    rich = PlannedJob("u", 1, 3, ScalingCurve({1: 1000.0, 3: 3000.0}))
    current = {"t": frozenset({"a", "gone"})}
    assert MilpPolicy().allocate(pool, [broken], current, 0.0).counts == {"t": 2}
    assert MilpPolicy("throughput").allocate(pool, [broken, rich], current, 0.0).counts == {"u": 3}


@pytest.mark.usefixtures("with_highs")
@pytest.mark.parametrize("seed", range(10))
def test_without_time_it_is_no_worse_than_leaving_things_as_they_are_and_says_so(seed):
    case = measured_like_instance(seed, trainers=20, nodes=100)
    values = formula(case, resolve_objective("speedup"))
    stay = values[np.arange(20), list(held(case).values())].sum()
    best = best_value(values)
    policy = MilpPolicy(horizon=timedelta(seconds=T), time_limit=timedelta(microseconds=1))
    decision = policy.allocate(case.pool, case.trainers, case.current, 0.0)
    assert stay <= decision.objective <= best * (1 + 1e-9)
    assert decision.bound >= best * (1 - 1e-9)
    assert decision.proven_optimal == (decision.bound - decision.objective <= 1e-9 * decision.bound)


@pytest.mark.usefixtures("with_highs")
@pytest.mark.parametrize("seed", range(5))
def test_gap_bounds_what_is_given_away(seed):
    case = measured_like_instance(seed, trainers=10, nodes=60)
    best = best_value(formula(case, resolve_objective("speedup")))
    decision = MilpPolicy(gap=0.05, **PATIENT).allocate(case.pool, case.trainers, case.current, 0.0)
    assert 0.95 * best <= decision.objective <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= decision.bound


@pytest.mark.usefixtures("with_highs")
def test_a_process_that_uses_highs_with_other_threads_changes_nothing():
    case = measured_like_instance(1, trainers=10, nodes=60)
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.silent()
    other.setOptionValue("threads", 2)
    other.addVariable(0, 1)
    other.run()
    try:
        assert_optimal(case)
    finally:
        highspy.Highs.resetGlobalScheduler(True)


def hundred_jobs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and counts of 100 jobs of up to 12 nodes, of which as many have 5 or more as 600 nodes allow."""
    random = np.random.default_rng(seed)
    counts, values = np.arange(601), np.full((100, 601), -np.inf)
    now = random.integers(5, 13, 100)
    for row, have in enumerate(now.tolist()):
        values[row, :13] = T * counts[:13] ** 0.95 - 10.0 * (counts[:13] != have) * have**0.95
    return values, np.where(np.cumsum(now) <= 600, now, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_jobs_that_have_lost_nodes_are_decided_without_branch_and_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took up to a second for such a decision, in which the driver took no message."""
    monkeypatch.setattr(count_model, "make_solver", lambda *_: pytest.fail("HiGHS was called"))
    values, now = hundred_jobs(seed)
    solution = maximise_counts(values, now)
    assert solution.is_proven
    assert solution.objective == pytest.approx(best_value(values), rel=1e-9)


def test_what_exceeds_a_known_regret_is_not_added_up() -> None:
    cores = [(np.arange(6), np.abs(np.arange(6) - 3.0))] * 200
    counts, regret = least_regret(cores, 599, 0.5, 2.0, most=20_000)  # 600,000 sums without a limit
    assert (counts.sum(), regret) == (599, 1.0)


def test_other_counts_that_are_better_by_rounding_only_are_no_reason_to_change() -> None:
    tenths = [
        [0, 0, 4, 0, 0, 5, 9, 0],
        [0, 0, 0, 7, 5, 2, 1, 0],
        [0, 0, 7, 10, 8, 8, 5, 9],
        [0, 0, 4, 3, 3, 10, 10, 5],
    ]
    for now in ([2, 0, 3, 2], [2, 3, 2, 0]):  # 18 tenths, in either order
        assert maximise_counts(np.array(tenths) * 0.1, np.array(now)).counts.tolist() == now


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"horizon": timedelta(0)}, "horizon must be longer than zero"),
        ({"horizon": 60}, r"horizon must be a timedelta, got 60; in seconds: timedelta\(seconds=60\)"),
        ({"time_limit": timedelta(seconds=-1)}, "time_limit must be longer than zero"),
        ({"gap": -0.1}, "gap"),
        ({"gap": 1.0}, "gap"),
        ({"gap": float("nan")}, "gap"),
        ({"objective": "best"}, "unknown objective 'best'"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(InvalidSettings, match=message):
        MilpPolicy(**setting)


def test_a_problem_that_recurs_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    monkeypatch.setattr(milp, "maximise_counts", lambda *args, **kw: solved.append(1) or maximise_counts(*args, **kw))
    case = measured_like_instance(3, trainers=10, nodes=60)
    policy = MilpPolicy(**PATIENT)
    first = policy.allocate(case.pool, case.trainers, case.current, case.now)
    again = policy.allocate(case.pool, case.trainers, case.current, case.now + 30.0)
    assert len(solved) == 1
    assert (again.allocation, again.objective, again.bound) == (first.allocation, first.objective, first.bound)
    policy.allocate(case.pool, case.trainers[1:], case.current, case.now)
    assert len(solved) == 2


def test_a_solve_without_a_proof_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def without_proof(*args, **kw):
        solved.append(1)
        solution = maximise_counts(*args, **kw)
        return replace(solution, bound=2 * solution.bound)

    monkeypatch.setattr(milp, "maximise_counts", without_proof)
    case = measured_like_instance(3, trainers=10, nodes=60)
    policy = MilpPolicy(**PATIENT)
    for _ in range(2):
        assert not policy.allocate(case.pool, case.trainers, case.current, case.now).proven_optimal
    assert len(solved) == 2
