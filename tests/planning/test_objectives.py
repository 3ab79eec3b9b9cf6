"""Objectives by name and as functions, and the value of a change of nodes."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import (
    OBJECTIVES,
    Deadline,
    MaxMin,
    Moment,
    WithBonus,
    at_moment,
    charged,
    objective_table,
    resolve_objective,
    value_table,
)
from freetrain_parsl.planning.objectives.deadlines import DueWork, rates_now
from freetrain_parsl.planning.objectives.fairness import Claim, fair_levels, seated
from freetrain_parsl.planning.policies import EqualSharePolicy, MilpPolicy
from freetrain_parsl.testing.instances import random_instance
from freetrain_parsl.testing.policy_suite import PolicyConformance
from tests.support.exact import best_value, value

PLAIN = ("priority", "speedup", "throughput")
TRAINER = PlannedJob("t", 2, 6, ScalingCurve({1: 100.0, 2: 200.0, 6: 400.0}), CostsInSeconds(10, 5, 3), priority=3.0)


@pytest.mark.parametrize(("name", "expected"), [("throughput", 400.0), ("speedup", 2.0), ("priority", 6.0)])
def test_named_objectives(name, expected):
    assert resolve_objective(name)(TRAINER, 6) == expected


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", range(5))
def test_table_agrees_with_single_calls(name, seed):
    objective = resolve_objective(name)
    for trainer in random_instance(seed).trainers:
        quick = objective_table(objective, trainer, 30)
        slow = objective_table(objective.__call__, trainer, 30)  # a plain function
        np.testing.assert_allclose(quick, slow, rtol=1e-12)


def test_speedup_of_a_trainer_without_rate_at_its_minimum_is_in_units_of_its_next_rate():
    trainer = PlannedJob("t", 1, 4, ScalingCurve({1: 0.0, 2: 50.0, 4: 100.0}))
    assert resolve_objective("speedup")(trainer, 4) == 2.0
    idle = PlannedJob("t", 1, 4, ScalingCurve({1: 0.0}))
    assert resolve_objective("speedup")(idle, 4) == 0.0


def test_table_is_nan_outside_the_bounds():
    table = objective_table(resolve_objective("throughput"), TRAINER, 8)
    assert np.isnan(table).tolist() == [False, True] + [False] * 5 + [True] * 2
    assert table[0] == 0.0


def test_functions_are_asked_only_within_the_bounds():
    asked = []

    def spy(trainer, nodes):
        asked.append(nodes)
        return 1

    objective_table(resolve_objective(spy), TRAINER, 4)
    assert asked == [2, 3, 4]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "1", None, True, [1]])
def test_what_a_function_returns_is_checked(bad):
    with pytest.raises(InvalidSettings, match="trainer 't' on 2 nodes"):
        objective_table(lambda t, n: bad, TRAINER, 4)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidSettings,
        match="unknown objective 'speed'; available: completion-time, completion-utility, deadline, max-min, priority, "
        "speedup, throughput",
    ):
        resolve_objective("speed")
    with pytest.raises(InvalidSettings, match="got 42"):
        resolve_objective(42)


@pytest.mark.parametrize("current", range(9))
def test_value_table_is_the_formula(current):
    objective = resolve_objective("throughput")
    table = value_table(objective, TRAINER, current, 8, horizon=60.0)
    allowed = [0, *range(2, 7)]
    assert np.flatnonzero(np.isfinite(table)).tolist() == allowed
    for nodes in allowed:
        assert table[nodes] == pytest.approx(value(objective, TRAINER, current, nodes, 60.0), rel=1e-12)


def test_value_by_hand():
    table = value_table(resolve_objective("throughput"), TRAINER, 4, 6, horizon=60.0)
    # Rates 200, 250, 300, 350, 400 on 2 … 6 nodes; growing costs 10 s, shrinking 5 s, of the 300 it has.
    assert table[[0, 2, 3, 4, 5, 6]].tolist() == [-1500, 10500, 13500, 18000, 18000, 21000]
    started = value_table(resolve_objective("throughput"), TRAINER, 0, 6, horizon=60.0)
    assert started[[0, 2, 6]].tolist() == [0, 57 * 200, 57 * 400]


def test_trainer_larger_than_the_pool_is_worth_nothing_there():
    table = value_table(resolve_objective("speedup"), TRAINER, 0, 1, horizon=60.0)
    assert table.tolist() == [0.0, -math.inf]
    lost = value_table(resolve_objective("throughput"), TRAINER, 1, 1, horizon=60.0)
    assert lost.tolist() == [-5 * 200.0, -math.inf]


class TestDeadlinePolicy(PolicyConformance):
    def make_policy(self):
        return MilpPolicy("deadline")


class TestMaxMinPolicy(PolicyConformance):
    def make_policy(self):
        return MilpPolicy("max-min")


# Trade-offs, through the policy.

LINEAR = ScalingCurve({1: 100.0, 64: 6400.0})


def pool(nodes):
    return Pool(PoolNode(f"n{i:02}") for i in range(nodes))


def decide(objective, nodes, *trainers, now=0.0, **held):
    """Return the optimal policy's counts, in the trainers' order; `held` are their numbers of nodes before."""
    names = iter(f"n{i:02}" for i in range(nodes))
    current = {trainer: frozenset(next(names) for _ in range(count)) for trainer, count in held.items()}
    counts = MilpPolicy(objective).allocate(pool(nodes), trainers, current, now).counts
    return [counts.get(trainer.name, 0) for trainer in trainers]


def saturating(name, one, serial, most=16, **options):
    rates = {n: one / (serial + (1 - serial) / n) for n in range(1, most + 1)}
    return PlannedJob(name, 1, most, ScalingCurve(rates), **options)


def test_throughput_goes_to_the_quick_and_speedup_to_those_that_scale():
    quick, scaling = saturating("quick", 1000.0, 0.3), saturating("scaling", 10.0, 0.01)
    assert decide("throughput", 12, quick, scaling) == [12, 0]
    assert decide("speedup", 12, quick, scaling)[1] > 6


def test_priority_buys_nodes():
    first, second = saturating("first", 100.0, 0.1), saturating("second", 100.0, 0.1)
    assert decide("priority", 10, first, second) == [5, 5]
    assert decide("priority", 10, first, replace(second, priority=3.0))[1] > 5


def test_a_users_function_decides():
    def even(trainer, nodes):
        return float(nodes % 2 == 0)

    assert decide(even, 5, saturating("a", 1.0, 0.1), saturating("b", 1.0, 0.1)) == [2, 2]


def test_deadline_is_met_before_throughput_and_with_no_more_nodes_than_that_takes():
    quick = PlannedJob("quick", 1, 16, ScalingCurve({1: 1000.0, 16: 16000.0}))
    urgent = PlannedJob("urgent", 1, 16, LINEAR, work_left=47_000.0, deadline=100.0)
    assert decide("throughput", 12, quick, urgent) == [12, 0]
    assert decide("deadline", 12, quick, urgent) == [7, 5]  # 470 samples per second
    assert decide("deadline", 12, quick, urgent, now=50.0) == [2, 10]
    assert decide("deadline", 12, quick, replace(urgent, deadline=None)) == [12, 0]


def test_a_deadline_that_cannot_be_met_counts_for_nothing():
    quick = PlannedJob("quick", 1, 16, ScalingCurve({1: 1000.0, 16: 16000.0}))
    urgent = PlannedJob("urgent", 1, 16, LINEAR, work_left=47_000.0, deadline=100.0)
    for late in (replace(urgent, max_nodes=4), replace(urgent, deadline=-1.0), replace(urgent, work_left=math.inf)):
        assert decide("deadline", 12, quick, late) == [12, 0]
    # Starting takes time too: after 60 s, 40 are left, and 16 nodes are not sufficient.
    assert decide("deadline", 16, quick, replace(urgent, costs=CostsInSeconds(start=60.0), work_left=65e3)) == [16, 0]
    assert decide("deadline", 16, quick, replace(urgent, costs=CostsInSeconds(start=60.0), work_left=60e3)) == [1, 15]


def test_a_deadline_that_a_larger_pool_would_meet_gets_what_there_is():
    quick = PlannedJob("quick", 1, 16, ScalingCurve({1: 1000.0, 16: 16000.0}))
    urgent = PlannedJob("urgent", 1, 16, LINEAR, work_left=100_000.0, deadline=100.0)
    assert decide("deadline", 8, quick, urgent) == [0, 8]


def test_nodes_beyond_the_need_are_given_back_whatever_the_bonus():
    quick = PlannedJob("quick", 1, 16, ScalingCurve({1: 1000.0, 16: 16000.0}))
    urgent = PlannedJob("urgent", 1, 16, LINEAR, CostsInSeconds(10, 5), work_left=47_500.0, deadline=100.0)
    assert decide("deadline", 12, quick, urgent, urgent=12) == [7, 5]
    # With 4750 samples a second to lose and 100 each to win, changes would not pay off for the secondary objective.
    slow = replace(quick, curve=ScalingCurve({1: 4.0, 16: 64.0}))
    assert decide("deadline", 12, slow, urgent, urgent=12) == [0, 12]


def test_later_deadlines_wait_if_they_can():
    """Both fit one after the other but not concurrently: the first deadline is served first."""
    first = PlannedJob("first", 1, 10, LINEAR, work_left=100e3, deadline=100.0)
    later = PlannedJob("later", 1, 10, LINEAR, work_left=500e3, deadline=1000.0)
    assert decide("deadline", 10, first, later) == [10, 0]
    # With more work the later one needs some nodes now; then only one deadline can be met: that of the smaller job.
    assert decide("deadline", 10, replace(first, work_left=70e3), replace(later, work_left=930e3)) == [7, 3]
    assert decide("deadline", 10, first, replace(later, work_left=950e3)) == [10, 0]
    # Unless priorities decide otherwise.
    assert decide("deadline", 10, first, replace(later, work_left=950e3, priority=20.0)) == [0, 10]


@pytest.mark.parametrize("seed", range(40))
def test_deadlines_that_fit_side_by_side_are_all_on_their_way(seed):
    """For any curves, costs and current nodes, no trainer gets less than it needs."""
    case = random_instance(seed)
    rng = np.random.default_rng(seed)
    left = len(case.pool)
    trainers, needs = [], set()
    for t in case.trainers:
        held = len(case.current.get(t.name, frozenset()) & case.pool.keys())
        count = int(rng.integers(t.min_nodes, t.max_nodes + 1))
        changes = t.costs.up + t.costs.down if held else t.costs.start
        if rng.random() < 0.7 and count <= left and t.rate(count) > 0:
            left -= count
            seconds = float(rng.uniform(10, 1000))
            needs.add(t.name)
            work = 0.99 * t.rate(count) * seconds
            trainers.append(replace(t, work_left=work, deadline=case.now + changes + seconds))
        else:
            trainers.append(t)
    counts = MilpPolicy("deadline").allocate(case.pool, trainers, case.current, case.now).counts
    for t in trainers:
        if t.name in needs:
            assert t.rate(counts.get(t.name, 0)) * (t.deadline - case.now) >= t.work_left


def run(trainers, nodes, objective, *, step=20.0, steps=200):
    """Simulate a constant pool with changes that cost time; return when each trainer was done and the counts."""
    policy = MilpPolicy(objective)
    alive = {t.name: t for t in trainers}
    current, done, history, now = {}, {}, [], 0.0
    for _ in range(steps):
        decision = policy.allocate(pool(nodes), list(alive.values()), current, now)
        history.append((now, decision.counts))
        for name, trainer in list(alive.items()):
            before, count = len(current.get(name, ())), decision.counts.get(name, 0)
            costs = trainer.costs
            lost = 0.0 if count == before else costs.start if not before else costs.up if count > before else costs.down
            work_left = max(trainer.work_left - trainer.rate(count) * (step - lost), 0.0)
            since = now if bool(count) != bool(before) else trainer.since
            alive[name] = replace(trainer, work_left=work_left, since=since)
            if work_left == 0:
                done[name] = now + step
                del alive[name]
        current = {name: held for name, held in decision.allocation.items() if name in alive}
        now += step
    return done, history


@pytest.mark.parametrize("seed", range(4))
def test_deadlines_that_fit_are_met_while_time_goes_by(seed):
    """Each needs up to its share of the pool for 90 % of its time: none is late, unlike with throughput."""
    rng = np.random.default_rng(seed)
    costs = CostsInSeconds(up=3.0, down=2.0, start=4.0)
    deadlines = rng.choice(np.arange(600.0, 3600.0, 20.0), size=4, replace=False)
    shares = [3, 4, 5, 4]
    urgent = []
    for index, (deadline, share) in enumerate(zip(deadlines.tolist(), shares, strict=True)):
        curve = saturating("x", float(rng.uniform(50, 200)), 0.02).curve
        work = 0.9 * curve(share) * deadline
        urgent.append(PlannedJob(f"u{index}", 1, 16, curve, costs, work_left=work, deadline=deadline))
    greedy = PlannedJob("greedy", 1, 16, ScalingCurve({1: 1000.0, 16: 16000.0}), costs)
    done, _ = run([*urgent, greedy], 16, "deadline")
    assert all(done.get(t.name, math.inf) <= t.deadline for t in urgent), (done, deadlines)
    late, _ = run([*urgent, greedy], 16, "throughput")
    assert any(late.get(t.name, math.inf) > t.deadline for t in urgent)


def test_max_min_raises_the_smallest_speedup_at_the_price_of_the_sum():
    trainers = [saturating("flat", 100.0, 0.3), saturating("middle", 100.0, 0.1), saturating("steep", 100.0, 0.0)]

    def speedups(objective):
        return [t.rate(n) / t.rate(1) for t, n in zip(trainers, decide(objective, 12, *trainers), strict=True)]

    best, fair = speedups("speedup"), speedups("max-min")
    assert min(fair) > min(best)
    assert sum(fair) < sum(best)


def test_max_min_changes_nothing_for_a_gain_that_does_not_pay():
    a, b = (PlannedJob(name, 1, 16, LINEAR, CostsInSeconds(18, 12)) for name in "ab")
    assert decide("max-min", 21, a, b, a=10, b=10) == [10, 10]
    assert decide("max-min", 24, a, b, a=10, b=10) == [12, 12]
    assert decide("max-min", 16, a, b, a=13, b=3) == [8, 8]


def brute_force_smallest(tables, nodes):
    best = 0.0
    for count in np.ndindex(*[nodes + 1] * len(tables)):
        if sum(count) <= nodes:
            best = max(best, min(float(t[n]) for t, n in zip(tables, count, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_no_counts_have_a_higher_smallest_level(seed):
    rng = np.random.default_rng(seed)
    tables = [np.concatenate([[0.0], rng.integers(0, 6, size=7).astype(float)]) for _ in range(3)]
    assert min(fair_levels(tables, 7)) == brute_force_smallest(tables, 7)


def test_when_nodes_are_too_few_trainers_take_turns_and_none_waits_longer_than_the_bound():
    """With k others waiting, a wait lasts at most (k + 1) turns plus as many intervals between decisions."""
    turn, step, nodes = 100.0, 20.0, 6
    costs = CostsInSeconds(18, 12, 10)
    trainers = [
        PlannedJob(f"t{i}", low, 6, LINEAR, costs, submitted=float(i)) for i, low in enumerate([1, 4, 2, 6, 3, 1])
    ]
    _, history = run(trainers, nodes, MaxMin(turn=timedelta(seconds=turn)), step=step, steps=300)
    served: dict[str, list[float]] = {t.name: [0.0] for t in trainers}
    for now, counts in history:
        for name in counts:
            served[name].append(now)
    longest = {name: max(np.diff([*times, history[-1][0]])) for name, times in served.items()}
    assert max(longest.values()) <= len(trainers) * (turn + step)
    assert min(longest.values()) >= turn  # every trainer has waited
    _, greedy = run(trainers, nodes, "speedup", step=step, steps=300)
    assert len({name for _, counts in greedy for name in counts}) < len(trainers)


def test_who_waits_is_not_overtaken_and_who_runs_keeps_its_turn():
    small, large, running = Claim("s", 1, 5.0, False), Claim("l", 4, 0.0, False), Claim("r", 2, 3.0, True)
    assert seated([small, large, running], 5, now=10.0, turn=60.0) == {"r"}
    assert seated([small, large, running], 6, now=10.0, turn=60.0) == {"r", "l"}
    assert seated([small, large, running], 5, now=90.0, turn=60.0) == {"l", "s"}
    assert seated([small, large, running], 3, now=10.0, turn=60.0) == {"r", "s"}  # l is larger than the pool


def test_deadlines_that_do_not_fit_together_cost_the_most_demanding():
    rates = np.arange(11) * 100.0
    jobs = [DueWork("a", 60e3, 100.0, rates), DueWork("b", 50e3, 100.0, rates), DueWork("c", 20e3, 100.0, rates)]
    assert rates_now(jobs, 10) == {"b": 500.0, "c": 200.0}
    assert rates_now([replace(jobs[0], priority=5.0), *jobs[1:]], 10) == {"a": 600.0, "c": 200.0}
    assert rates_now(jobs[:1], 3) == {}
    # The most demanding job is not rejected for one that does not fit without it either.
    steep = np.where(np.arange(11) >= 10, 1000.0, 0.0)
    assert rates_now([jobs[1], DueWork("d", 95e3, 100.0, steep)], 10) == {"b": 500.0}


def test_a_bonus_is_earned_but_not_charged():
    base = resolve_objective("throughput")
    extra = WithBonus(base, {"t": np.array([0.0, 0, 0, 0, 1000, 1000, 1000])})
    assert charged(extra) is base
    more = np.array([0, 0, 0, 0, 60e3, 60e3, 60e3])
    np.testing.assert_array_equal(
        value_table(extra, TRAINER, 4, 6, 60.0), value_table(base, TRAINER, 4, 6, 60.0) + more
    )
    assert extra(TRAINER, 5) == base(TRAINER, 5) + 1000
    # A trainer below its minimum is charged at its smallest allowed count, even if the pool has less.
    lost = replace(TRAINER, min_nodes=5)
    short = WithBonus(base, {"t": np.array([0.0, 0.0])})
    assert value_table(short, lost, 1, 1, 60.0).tolist() == [-5 * 350.0, -math.inf]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES.keys() - set(PLAIN)))
@pytest.mark.parametrize("seed", range(30))
def test_contextual_objectives_are_solved_to_the_optimum(objective, seed):
    case = random_instance(seed)
    rng = np.random.default_rng(seed)
    trainers = [
        replace(t, work_left=float(rng.uniform(0, 1e6)), deadline=case.now + float(rng.uniform(-10, 2000)))
        for t in case.trainers
    ]
    held = {t.name: len(case.current.get(t.name, frozenset()) & case.pool.keys()) for t in trainers}
    worth = at_moment(resolve_objective(objective), Moment(trainers, held, len(case.pool), case.now))
    values = [value_table(worth, t, held[t.name], len(case.pool), 120.0) for t in trainers]
    best = best_value(np.array(values)) if values else 0.0
    patient = MilpPolicy(objective, time_limit=timedelta(minutes=1))
    decision = patient.allocate(case.pool, trainers, case.current, case.now)
    assert decision.objective == pytest.approx(best, rel=1e-9, abs=1e-6)
    assert decision.bound == pytest.approx(best, rel=1e-9, abs=1e-6)
    shares = EqualSharePolicy(objective).allocate(case.pool, trainers, case.current, case.now)
    assert shares.objective <= best + 1e-6 * max(1.0, abs(best))


def test_settings_of_contextual_objectives_are_checked():
    with pytest.raises(InvalidSettings, match="turn must be positive"):
        MaxMin(turn=timedelta(0))
    with pytest.raises(InvalidSettings, match="must be a function"):
        Deadline("speedup")
    assert Deadline(OBJECTIVES["speedup"]).objective is OBJECTIVES["speedup"]
