"""The window policy: the effect of known closings and of their probabilities."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.placement import check_allocation
from freetrain_parsl.planning.policies import MilpPolicy, WindowPolicy
from freetrain_parsl.testing.instances import random_instance

COSTS = CostsInSeconds(up=18.0, down=12.0)
LINEAR = ScalingCurve({1: 10.0, 64: 640.0})


def trainer(name, least=1, most=64, curve=LINEAR, costs=COSTS, **more):
    return PlannedJob(name, least, most, curve, costs, **more)


def nodes(prefix, number, closes=None, **more):
    return [PoolNode(f"{prefix}{i}", closes, **more) for i in range(number)]


def decide(pool, trainers, current=None, **settings):
    policy = WindowPolicy("throughput", **{"time_limit": timedelta(minutes=1), "gap": 0.0} | settings)
    decision = policy.allocate(pool, trainers, current or {}, 0.0)
    check_allocation(decision.allocation, pool, trainers)
    return decision


@pytest.mark.parametrize("seed", range(20))
def test_without_closings_it_is_the_count_model(seed):
    case = random_instance(seed)
    pool = Pool(PoolNode(name) for name in case.pool)
    both = [
        policy.allocate(pool, case.trainers, case.current, 0.0)
        for policy in (WindowPolicy(gap=0.0, time_limit=timedelta(minutes=1)), MilpPolicy())
    ]
    assert both[0].objective == pytest.approx(both[1].objective)
    assert both[0].bound == pytest.approx(both[1].bound)


def test_nodes_that_close_together_go_to_one_trainer():
    pool = Pool([*nodes("soon", 4, 100.0), *nodes("late", 4, 5000.0)])
    allocation = decide(pool, [trainer("a", most=4), trainer("b", most=4)]).allocation
    assert {frozenset(n[:4] for n in held) for held in allocation.values()} == {
        frozenset({"soon"}),
        frozenset({"late"}),
    }


def test_nodes_that_close_too_soon_to_pay_stay_free():
    """Growing costs 18 s of eight nodes, and the closing 12 s of nine: one node does not earn that in 100 s."""
    pool = Pool([*nodes("late", 8), PoolNode("soon", 100.0)])
    current = {"a": frozenset(f"late{i}" for i in range(8))}
    assert decide(pool, [trainer("a")], current).counts == {"a": 8}
    without_knowledge = Pool([*nodes("late", 8), PoolNode("soon")])
    assert decide(without_knowledge, [trainer("a")], current, horizon=timedelta(minutes=10)).counts == {"a": 9}


def test_nodes_likely_to_close_go_to_the_small_trainer():
    """The trainer with the risky node pays at its rate when the node closes, so it is not the large one."""
    pool = Pool([*nodes("big", 30), *nodes("tiny", 2), PoolNode("risky", closing_rate=0.01)])
    current = {"b": frozenset(f"big{i}" for i in range(30)), "t": frozenset({"tiny0", "tiny1"})}
    free_growth = CostsInSeconds(up=0.0, down=12.0)
    trainers = [trainer("b", costs=free_growth), trainer("t", costs=free_growth)]
    assert "risky" in decide(pool, trainers, current).allocation["t"]


def discounted(allocation, trainers, pool, horizon):
    """Return the value of an allocation without costs, by the formula: rates over the intervals, exp(-t / T) at t."""
    times = [0.0, *sorted({node.closes for node in pool.values()})]
    return sum(
        horizon * (math.exp(-a / horizon) - math.exp(-b / horizon)) * t.rate(n)
        for t in trainers
        for a, b in itertools.pairwise(times)
        if (n := sum(pool[name].closes >= b for name in allocation.get(t.name, ())))
    )


@pytest.mark.parametrize("seed", range(5))
def test_is_never_worth_less_than_the_count_models_nodes(seed):
    """For any gap at which it may stop; and its objective equals the formula."""
    rng = np.random.default_rng(seed)
    pool = Pool(PoolNode(f"n{i:02}", float(rng.choice([40.0, 90.0, 400.0, 3000.0]))) for i in range(24))
    curve = ScalingCurve({1: 10.0, 4: 35.0, 16: 90.0})
    trainers = [trainer(f"t{i}", most=16, curve=curve, costs=CostsInSeconds()) for i in range(4)]
    horizon = timedelta(seconds=120)
    counted = MilpPolicy("throughput", horizon=horizon).allocate(pool, trainers, {}, 0.0)
    least = discounted(counted.allocation, trainers, pool, 120.0)
    for gap in (0.9, 0.0):
        decision = decide(pool, trainers, gap=gap, horizon=horizon)
        assert decision.objective == pytest.approx(discounted(decision.allocation, trainers, pool, 120.0))
        assert decision.bound >= decision.objective >= least - 1e-9


def test_windows_that_pay_for_their_block_are_used():
    pool = Pool([PoolNode("here"), *nodes("long", 3, 4000.0, startup=30.0), *nodes("short", 3, 40.0, startup=30.0)])
    allocation = decide(pool, [trainer("a")], horizon=timedelta(minutes=10)).allocation
    assert allocation["a"] == {"here", "long0", "long1", "long2"}


def test_no_more_windows_than_blocks():
    offered = [*nodes("x", 3, 3000.0, startup=5.0), *nodes("y", 2, 4000.0, startup=5.0)]
    trainers = [trainer("a", most=8)]
    horizon = timedelta(minutes=10)
    assert decide(Pool(offered), trainers, horizon=horizon).counts == {"a": 5}
    assert decide(Pool(offered, max_blocks=1), trainers, horizon=horizon).allocation["a"] == {"x0", "x1", "x2"}
    assert decide(Pool(offered, max_blocks=0), trainers, horizon=horizon).allocation == {}


def test_many_closings_are_taken_together():
    pool = Pool(PoolNode(f"n{i:03}", 50.0 + 7.0 * i) for i in range(100))
    decision = decide(pool, [trainer("a"), trainer("b")], max_classes=5)
    assert 90 < sum(decision.counts.values()) <= 100  # some close too soon to pay off


@pytest.mark.parametrize("objective", ["deadline", "max-min", "priority"])
def test_every_objective_works_with_it(objective):
    pool = Pool([*nodes("soon", 3, 200.0), *nodes("late", 3, 5000.0)])
    trainers = [
        trainer("urgent", work_left=18_000.0, deadline=600.0, most=6),
        trainer("other", priority=2.0, most=6, curve=ScalingCurve({1: 100.0, 6: 600.0})),
    ]
    decision = WindowPolicy(objective, gap=0.0).allocate(pool, trainers, {}, 0.0)
    check_allocation(decision.allocation, pool, trainers)
    if objective == "deadline":
        assert decision.counts["urgent"] >= 3  # 18,000 samples in 600 s at 10/s a node
    if objective == "max-min":
        assert min(decision.counts.values()) == 3
    if objective == "priority":
        assert decision.counts["other"] > decision.counts.get("urgent", 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"horizon": timedelta(0)},
        {"time_limit": timedelta(0)},
        {"gap": 1.0},
        {"max_classes": 0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(InvalidSettings, match="policy 'window'"):
        WindowPolicy(**settings)
