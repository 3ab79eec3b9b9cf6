"""ONES: exact where counts suffice, better than placed counts where they do not; its operators."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.goodput.completion import CompletionTime
from freetrain_parsl.extensions.goodput.evolution import LayoutBreeder, contiguous_starts, evolve
from freetrain_parsl.extensions.goodput.ones import OnesPolicy, PlacedValues
from freetrain_parsl.extensions.goodput.ones_published import OnesPublishedPolicy
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import EpochCount, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import Moment, resolve_objective
from freetrain_parsl.planning.placement import check_allocation, current_counts
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.testing.instances import random_instance, shared_hosts_instance


def decide(policy, case):
    return policy.allocate(case.pool, case.trainers, case.current, case.now)


def value_of(case, allocation, objective="speedup"):
    """Return the value of an allocation, placement included."""
    ranked = sorted(case.trainers, key=lambda trainer: (trainer.submitted, trainer.name))
    moment = Moment(ranked, current_counts(ranked, case.pool, case.current), len(case.pool), case.now)
    return PlacedValues(resolve_objective(objective), moment, case.pool.horizon).total(
        allocation, case.pool, case.current
    )


@pytest.mark.parametrize("seed", range(10))
def test_without_shared_hosts_it_is_exact(seed):
    case = random_instance(seed)
    ones, exact = decide(OnesPolicy(), case), decide(MilpPolicy(), case)
    assert ones.objective == pytest.approx(exact.objective)
    assert ones.proven_optimal == exact.proven_optimal


@pytest.mark.parametrize("objective", ["speedup", CompletionTime()])
def test_on_shared_hosts_it_is_the_exact_model(objective):
    """Where that is proven, nothing is left to find; its own account of the value is right."""
    for seed in range(8):
        case = shared_hosts_instance(seed)
        ones, exact = decide(OnesPolicy(objective), case), decide(MilpPolicy(objective), case)
        assert exact.proven_optimal
        assert ones.allocation == exact.allocation
        assert ones.objective == pytest.approx(value_of(case, ones.allocation, objective))


@pytest.mark.parametrize("seed", range(8))
def test_the_search_keeps_to_sizes_and_to_the_bound(seed):
    """Alone, without the exact optimum, it shares hosts in the same sizes, and is never worth more."""
    case = shared_hosts_instance(seed)
    alone = decide(OnesPolicy(warm_start=False), case)
    check_allocation(alone.allocation, case.pool, case.trainers)
    assert alone.objective == pytest.approx(value_of(case, alone.allocation))
    assert 0.7 * alone.bound <= alone.objective <= alone.bound * (1 + 1e-9)


def test_without_a_proof_it_searches_from_the_best_known(monkeypatch):
    """It is never worse than what the exact model found in its time."""
    case = shared_hosts_instance(3)
    known = decide(MilpPolicy(), case)
    poor = replace(known, proven_optimal=False, allocation=dict(list(known.allocation.items())[:1]))
    monkeypatch.setattr(MilpPolicy, "allocate", lambda *_: poor)
    found = decide(OnesPolicy(), case)
    check_allocation(found.allocation, case.pool, case.trainers)
    assert value_of(case, poor.allocation) < found.objective <= known.bound * (1 + 1e-9)


def test_the_search_finds_the_best_sizes():
    """Two hosts of four: counts 3, 3 and 2 are no sizes of parts, so that 4, 2 and 2 are the best."""
    curve = ScalingCurve({1: 10, 2: 19, 3: 27, 4: 30})
    trainers = tuple(PlannedJob(name, 1, 4, curve) for name in "abc")
    pool = Pool(PoolNode(f"h{host}/{slot}", host=f"h{host}") for host in range(2) for slot in range(4))
    for warm in (False, True):
        decision = OnesPolicy("throughput", warm_start=warm).allocate(pool, trainers, {}, 0.0)
        assert sorted(decision.counts.values()) == [2, 2, 4]


@pytest.mark.parametrize("seed", range(5))
def test_evolution_alone_comes_close_to_the_optimum(seed):
    case = random_instance(100 + seed)
    alone = decide(OnesPolicy(warm_start=False), case)
    assert alone.objective >= 0.9 * decide(MilpPolicy(), case).objective


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"population": 1}, "population must be a whole number of at least 2, got 1"),
        ({"generations": -1}, "generations must be a whole number of at least 0, got -1"),
        ({"patience": 0}, "patience"),
        ({"horizon": timedelta(0)}, "horizon"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(InvalidSettings, match=message):
        OnesPolicy(**settings)


# -- operators ---------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000))
def test_operators_keep_to_hosts_and_bounds(seed):
    """Whatever is crossed, evicted and filled: hosts are not exceeded, and trainers run within their bounds or not."""
    draw = Random(seed)
    hosts = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    lows = [draw.randint(1, 5) for _ in range(4)]
    bounds = [(low, low + draw.randint(0, 6)) for low in lows]
    weights = [draw.random() for _ in bounds]
    breeder = LayoutBreeder(
        hosts, bounds, lambda trainer, row: weights[trainer] * sum(n for _, n in row) ** 0.5 / max(len(row), 1)
    )
    population = [breeder.filled(((),) * len(bounds), draw) for _ in range(4)]
    for layout in [*population, *breeder.breed(population, draw)]:
        assert min(breeder.free(layout)) >= 0
        for row, (least, most) in zip(layout, bounds, strict=True):
            assert not row or least <= sum(nodes for _, nodes in row) <= most
            assert all(nodes > 0 for _, nodes in row)


def test_search_keeps_the_best_and_is_reproducible():
    def breed(population, draw):
        return [one + draw.choice((-1, 1)) for one in population]

    def found(**settings):
        return evolve([0, 3], breed, lambda x: -abs(x - 7), size=4, generations=50, patience=9, **settings)

    assert found(seed=1) == found(seed=1) == 7
    assert evolve([5], lambda *_: [1, 2], lambda x: x, size=2, generations=3, patience=3, seed=0) == 5


@given(seed=st.integers(0, 10_000))
def test_contiguous_starts_keep_as_many_nodes_as_possible(seed):
    """As many as the best of all starts in this order."""
    rng = np.random.default_rng(seed)
    nodes, counts = 8, []
    while (free := nodes - sum(counts)) and len(counts) < 3:
        counts.append(int(rng.integers(1, free + 1)))
    owner = rng.integers(-1, len(counts), nodes)
    held = np.array([owner == number for number in range(len(counts))])

    def kept(starts):
        return sum(held[i, start : start + counts[i]].sum() for i, start in enumerate(starts))

    def feasible(starts):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        return ends[-1] <= nodes and all(end <= start for end, start in zip(ends, starts[1:], strict=False))

    starts = contiguous_starts(counts, held)
    assert feasible(starts)
    assert kept(starts) == max(map(kept, filter(feasible, itertools.product(range(nodes), repeat=len(counts)))))


# -- as published ------------------------------------------------------------------------------------------------------


def _hosts(count):
    return Pool(PoolNode(f"h{host}/{slot}", host=f"h{host}") for host in range(count) for slot in range(4))


def test_published_limits_double_at_most():
    """A trainer grows to twice its nodes before others are served, and new ones begin on the fewest."""
    curve = ScalingCurve({1: 10, 8: 80})
    running = PlannedJob("a", 1, 8, curve, service=1e4, epochs=EpochCount(3, 5, 1e4))
    fresh = PlannedJob("b", 1, 2, curve, submitted=1.0, epochs=EpochCount(0, 5, 0.0))
    current = {"a": frozenset({"h0/0", "h0/1"})}
    counts = OnesPublishedPolicy().allocate(_hosts(2), (running, fresh), current, 0.0).counts
    assert counts["b"] >= 1
    assert counts["a"] >= 4


def test_published_trainers_are_contiguous():
    case = shared_hosts_instance(4)
    decision = decide(OnesPublishedPolicy(), case)
    order = {node: number for number, node in enumerate(case.pool)}
    for nodes in decision.allocation.values():
        positions = sorted(order[node] for node in nodes)
        assert positions == list(range(positions[0], positions[0] + len(positions)))
