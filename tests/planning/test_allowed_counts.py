"""Numbers of nodes that a job's model allows: the rule, each model against enumeration, the search for sizes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidApp, PlanningError
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.learning import Profile, as_learned
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.node_kinds import allocate_over_kinds
from freetrain_parsl.planning.placement import check_allocation
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.planning.policies.baselines import EqualSharePolicy, FirstComeFirstServedPolicy
from freetrain_parsl.planning.policies.window import WindowPolicy
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.planning.solvers.shared_hosts import maximise_on_hosts
from freetrain_parsl.protocol.codec import as_json, restored
from freetrain_parsl.testing.instances import Instance, random_instance, restricted
from tests.planning.small_events import SETTINGS
from tests.planning.test_milp import assert_optimal, instances
from tests.planning.test_node_kinds import best_by_enumeration, problems
from tests.planning.test_shared_hosts import best_value, pool_of, problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINEAR = ScalingCurve({1: 1.0, 64: 64.0})
EVEN, DIVISORS_OF_9 = AllowedCounts(2), AllowedCounts(divisor_of=9)


@st.composite
def rules(draw: st.DrawFn) -> AllowedCounts:
    multiple = draw(st.integers(1, 6))
    return AllowedCounts(multiple, multiple * draw(st.integers(0, 12)))


def listed(rule: AllowedCounts, most: int = 80) -> list[int]:
    """Return the counts by the words of the rule."""
    divides = [n for n in range(1, most + 1) if rule.divisor_of == 0 or rule.divisor_of % n == 0]
    return [n for n in divides if n % rule.multiple_of == 0]


@given(rules(), st.integers(0, 80))
def test_a_rule_allows_what_it_says(rule: AllowedCounts, count: int) -> None:
    counts = listed(rule)
    assert [n for n in range(81) if n in rule] == counts
    assert np.flatnonzero(rule.mask(np.arange(81))).tolist() == counts
    assert rule.at_most(count) == max((n for n in counts if n <= count), default=0)
    assert rule.at_least(count) == min((n for n in listed(rule, 200) if n >= count), default=0)


@given(rules(), rules(), st.integers(1, 6))
def test_rules_together_and_in_units_of_several_are_rules(one: AllowedCounts, other: AllowedCounts, size: int) -> None:
    both = sorted(set(listed(one, 900)) & set(listed(other, 900)))
    assert _counts_or_none(lambda: one & other, 900) == both
    in_units = [n for n in range(1, 900 // size + 1) if n * size in one]
    assert _counts_or_none(lambda: one.in_units(size), 900 // size) == in_units


def _counts_or_none(make: Callable[[], AllowedCounts], most: int) -> list[int]:
    try:
        return listed(make(), most)
    except InvalidApp:
        return []


def test_bounds_become_the_nearest_allowed_ones_within_them() -> None:
    job = PlannedJob("a", 1, 8, LINEAR, allowed_counts=AllowedCounts(2, 12))
    assert (job.min_nodes, job.max_nodes) == (2, 6)
    assert [n for n in range(20) if job.may_have(n)] == [2, 4, 6]
    assert [job.nearest(n) for n in (0, 3, 5, 7, 20)] == [2, 2, 4, 6, 6]
    assert replace(job, max_nodes=5).max_nodes == 4


def test_a_job_without_an_allowed_count_within_its_bounds_is_refused() -> None:
    with pytest.raises(InvalidApp, match=r"divisors of 9, and none of these is between min_nodes \(4\)"):
        PlannedJob("a", 4, 8, LINEAR, allowed_counts=DIVISORS_OF_9)
    with pytest.raises(InvalidApp, match="multiple of 4 and divides 6"):
        AllowedCounts(4) & AllowedCounts(divisor_of=6)
    with pytest.raises(InvalidApp, match="each node has 4"):
        AllowedCounts(divisor_of=6).in_units(4)


@given(rules())
def test_a_rule_is_in_records(rule: AllowedCounts) -> None:
    event = ev.TrainerSubmitted(1.0, PlannedJob("a", 1, 80, LINEAR, allowed_counts=rule))
    assert restored(as_json(event)) == event


def restrict(case: Instance, seed: int) -> Instance:
    return replace(case, trainers=tuple(restricted(case.trainers, seed)))


@given(instances(), st.integers(0, 1000))
@settings(deadline=None, max_examples=150)
def test_milp_equals_the_dynamic_programme(case: Instance, seed: int) -> None:
    assert_optimal(restrict(case, seed))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_milp_equals_the_dynamic_programme_on_random_instances(first: int) -> None:
    for seed in range(first, first + 20):
        if (case := restrict(random_instance(seed), seed)).trainers:
            assert_optimal(case)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_counts_on_shared_hosts_are_those_of_the_oracle_over_slots(first: int) -> None:
    for seed in range(first, first + 40):
        values, current, parts, move_costs = problem(seed)
        rng = np.random.default_rng(seed)
        for row in values:
            rule = AllowedCounts(int(rng.choice([1, 2, 3])), int(rng.choice([0, 6, 12])))
            row[1:][~rule.mask(np.arange(1, len(row)))] = -np.inf
        current = np.where(np.isfinite(values[np.arange(len(values)), current]), current, 0)
        solution = maximise_on_hosts(values, current, parts, move_costs)
        assert solution.is_proven, seed
        best = best_value(values, parts, move_costs, 0, tuple(parts.free.tolist()))
        assert solution.objective == pytest.approx(best, abs=1e-6), seed


@given(problems(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_milp_is_the_optimum_over_kinds_and_counts(
    problem: tuple[Pool, list[PlannedJob], dict[str, frozenset[str]]], seed: int
) -> None:
    pool, trainers, current = problem
    trainers = restricted(trainers, seed)
    decision = allocate_over_kinds(MilpPolicy("throughput"), pool, trainers, current, 0.0)
    check_allocation(decision.allocation, pool, trainers)
    assert decision.objective == pytest.approx(best_by_enumeration(trainers, pool, current), rel=1e-7, abs=1e-7)


def earned(given: Mapping[str, tuple[int, int]], jobs: list[PlannedJob], ends: tuple[float, float]) -> float:
    """Return the value of these nodes (that close first, that close later), by the formula of the policy `window`."""
    horizon = 120.0
    seconds = [horizon * (np.exp(-a / horizon) - np.exp(-b / horizon)) for a, b in pairwise((0.0, *ends))]
    return sum(
        length * job.rate(alive)
        for job in jobs
        for length, alive in zip(seconds, (sum(given[job.name]), given[job.name][1]), strict=True)
        if job.may_have(alive)
    )


@pytest.mark.parametrize("seed", range(12))
def test_window_is_the_optimum_over_nodes_of_two_closings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = (float(rng.uniform(20.0, 100.0)), float(rng.uniform(110.0, 400.0)))
    sizes = (int(rng.integers(1, 5)), int(rng.integers(1, 5)))
    pool = Pool(PoolNode(f"n{k}{i}", ends[k]) for k in (0, 1) for i in range(sizes[k]))
    jobs = restricted([PlannedJob(f"t{i}", 1, 6, curve(rng), submitted=float(i)) for i in range(3)], seed)
    choices = list(product(range(sizes[0] + 1), range(sizes[1] + 1)))
    per_job = [[c for c in choices if not any(c) or job.may_have(sum(c))] for job in jobs]
    best = max(
        earned({job.name: c for job, c in zip(jobs, some, strict=True)}, jobs, ends)
        for some in product(*per_job)
        if all(sum(c[k] for c in some) <= sizes[k] for k in (0, 1))
    )
    policy = WindowPolicy("throughput", horizon=timedelta(seconds=120), time_limit=timedelta(minutes=1), gap=0.0)
    decision = policy.allocate(pool, jobs, {}, 0.0)
    check_allocation(decision.allocation, pool, jobs)
    # The method proves a gap, not the optimum.
    assert 0.98 * best <= decision.objective <= best + 1e-6
    assert decision.bound >= best - 1e-6


def curve(rng: np.random.Generator) -> ScalingCurve:
    return ScalingCurve({n: float(rng.uniform(1.0, 3.0)) * n for n in (1, 2, 3, 4, 6)})


def test_rules_of_thumb_leave_to_others_what_a_job_may_not_have() -> None:
    jobs = [
        PlannedJob("a", 1, 8, LINEAR, allowed_counts=AllowedCounts(3)),
        PlannedJob("b", 1, 8, LINEAR, submitted=1.0),
    ]
    pool = Pool(PoolNode(f"n{i}") for i in range(10))
    assert FirstComeFirstServedPolicy().allocate(pool, jobs, {}, 0.0).counts == {"a": 6, "b": 4}
    assert EqualSharePolicy().allocate(pool, jobs, {}, 0.0).counts == {"a": 3, "b": 7}


def test_on_shared_hosts_a_count_is_allowed_and_a_size() -> None:
    """Of nodes of six, a job of an even number of processes can have two slots, or whole nodes."""
    job = PlannedJob("a", 1, 12, LINEAR, allowed_counts=EVEN)
    assert [job.at_most(n, 6) for n in (1, 2, 5, 6, 11, 12)] == [0, 2, 2, 6, 6, 12]
    assert [job.at_least(n, 6) for n in (1, 2, 3, 7)] == [2, 2, 6, 12]
    assert PlannedJob("c", 1, 12, LINEAR, allowed_counts=AllowedCounts(5)).at_most(12, 6) == 0
    others = [PlannedJob(f"b{number}", 1, 1, LINEAR) for number in range(3)]
    decision = MilpPolicy("throughput").allocate(pool_of(6, 2, per_host=6), [job, *others], {}, 0.0)
    assert decision.counts == {"a": 6, "b0": 1, "b1": 1}


def test_an_allocation_of_another_number_is_refused() -> None:
    pool = Pool(PoolNode(f"n{i}") for i in range(3))
    job = PlannedJob("a", 1, 4, LINEAR, allowed_counts=EVEN)
    with pytest.raises(PlanningError, match=r"takes 2 to 4 nodes in numbers that are multiples of 2, got 3"):
        check_allocation({"a": frozenset(pool)}, pool, [job])


def test_a_job_that_loses_a_node_continues_on_an_allowed_number() -> None:
    planner = Planner(MilpPolicy(), SETTINGS)
    job = PlannedJob("a", 1, 4, LINEAR, CostsInSeconds(1.0, 1.0, 1.0), allowed_counts=EVEN)
    joined = ev.NodesJoined(0.0, "b", tuple(PoolNode(f"n{i}") for i in range(4)))
    planner.advance(joined, ev.TrainerSubmitted(0.0, job))
    assert len(planner.assigned["a"]) == 4
    planner.advance(ev.NodesLeft(10.0, ("n0",)))
    assert len(planner.assigned["a"]) == 2


def test_counts_of_replicas_are_units_of_the_least_one_until_there_is_room_for_all() -> None:
    allowed = AllowedCounts(replicas=2, replica_of=3)
    assert [count for count in range(13) if count in allowed] == [3, 6, 8, 10, 12]
    assert [allowed.replicas_in(count) for count in (3, 6, 7, 8)] == [1, 2, 1, 2]
    assert [allowed.at_most(count) for count in (2, 5, 7)] == [0, 3, 6]
    assert [allowed.at_least(count) for count in (1, 4, 7, 9)] == [3, 6, 8, 10]
    assert allowed.in_units(3) == AllowedCounts(replicas=2, replica_of=1)


@given(
    rule=rules(),
    replicas=st.integers(1, 4),
    least=st.integers(1, 5),
    counts=st.lists(st.integers(1, 80), min_size=1, max_size=8),
)
def test_a_rule_is_on_the_size_of_one_replica(
    rule: AllowedCounts, replicas: int, least: int, counts: list[int]
) -> None:
    allowed = AllowedCounts(replicas=replicas, replica_of=least) & rule
    expected = [n for r in range(1, replicas + 1) for size in range(least, 81) for n in [r * size]
                if size in rule and (r == replicas or size == least)]  # fmt: skip
    assert {n for n in range(1, 81) if n in allowed} == {n for n in expected if n <= 80}
    assert [bool(each) for each in allowed.mask(np.array(counts))] == [count in allowed for count in counts]
    for count in counts:
        fitting = [n for n in range(1, 2000) if n in allowed]
        assert allowed.at_most(count) == max([n for n in fitting if n <= count], default=0)
        assert allowed.at_least(count) == min([n for n in fitting if n >= count], default=0)


def test_a_job_that_loses_a_replica_keeps_the_nodes_of_the_other() -> None:
    """Of three nodes that are left, the planner would keep others."""
    planner = Planner(MilpPolicy(), SETTINGS)
    allowed = AllowedCounts(replicas=2, replica_of=2)
    job = PlannedJob("a", 2, 4, LINEAR, CostsInSeconds(1.0, 1.0, 1.0), allowed_counts=allowed)
    nodes = tuple(PoolNode(f"n{i}") for i in range(4))
    planner.advance(ev.NodesJoined(0.0, "b", nodes), ev.TrainerSubmitted(0.0, job))
    assert planner.assigned["a"] == {"n0", "n1", "n2", "n3"}
    planner.advance(ev.NodesLeft(10.0, ("n1",)))
    assert planner.assigned["a"] == {"n0", "n2"}
    assert planner.advance(ev.TrainerHolds(10.0, "a", frozenset({"n2", "n3"}))) == []
    assert planner.assigned["a"] == {"n2", "n3"}
    planner.advance(ev.NodesJoined(20.0, "b", nodes[1:2]))
    assert planner.assigned["a"] == {"n0", "n1", "n2", "n3"}


def test_nodes_that_another_job_has_got_meanwhile_are_not_held() -> None:
    planner = Planner(MilpPolicy(), SETTINGS)
    one, other = (PlannedJob(name, 1, 1, LINEAR, CostsInSeconds(1.0, 1.0, 1.0)) for name in "ab")
    nodes = tuple(PoolNode(f"n{i}") for i in range(2))
    planner.advance(ev.NodesJoined(0.0, "b", nodes), ev.TrainerSubmitted(0.0, one), ev.TrainerSubmitted(0.0, other))
    taken = planner.assigned["b"]
    planner.advance(ev.TrainerHolds(1.0, "a", frozenset({"n0", "n1"})))
    assert planner.assigned["b"] == taken
    assert not planner.assigned["a"] & taken


def test_a_rule_that_is_learned_later_is_followed_at_once() -> None:
    planner = Planner(MilpPolicy(), SETTINGS)
    job = PlannedJob("a", 1, 3, LINEAR, CostsInSeconds(1.0, 1.0, 1.0))
    joined = ev.NodesJoined(0.0, "b", tuple(PoolNode(f"n{i}") for i in range(3)))
    planner.advance(joined, ev.TrainerSubmitted(0.0, job))
    assert len(planner.assigned["a"]) == 3
    planner.advance(ev.TrainerLearned(1.0, replace(job, allowed_counts=EVEN)))
    assert len(planner.assigned["a"]) == 2


def test_the_search_for_sizes_goes_to_the_next_one_that_is_allowed() -> None:
    """Of nine rows, three and nine nodes are tried, though twice one and twice three are not allowed."""
    job = PlannedJob("a", 1, 16, ScalingCurve.to_be_learned(), allowed_counts=DIVISORS_OF_9)
    profile, tried = Profile(), [1]
    while (most := as_learned(job, profile, 1.0).max_nodes) > tried[-1] or not profile.known:
        profile.observe(most, 10.0 * most, 1.0)
        assert as_learned(job, profile, 1.0).rate(most) == pytest.approx(10.0 * most)
        tried.append(most)
    assert tried[1:] == [1, 3, 9]


@pytest.mark.parametrize(("slots", "sizes"), [(6, [1, 2, 6, 12]), (12, [1, 2, 4, 12])])
def test_the_search_for_sizes_goes_to_the_next_size_of_shared_nodes(slots: int, sizes: list[int]) -> None:
    job, profile = PlannedJob("a", 1, 12, ScalingCurve.to_be_learned()), Profile()
    for size in sizes:
        learned = as_learned(job, profile, 1.0, slots)
        assert learned.max_nodes == size
        profile.observe(size, 10.0 * size, 1.0)
