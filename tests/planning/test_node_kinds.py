"""The choice of kinds against enumeration, and what never changes where there is one kind."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import BlockTerms, CostsInSeconds, PlannedJob, Pool, PoolNode, Window
from freetrain_parsl.planning.node_kinds import allocate_over_kinds
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.placement import check_allocation
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import POLICIES, MilpPolicy, WindowPolicy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.testing.instances import random_instance
from tests.support.exact import value

GPU, CPU = "gpu", "cpu"
HORIZON = 120.0


def nodes(kind: str, number: int, **values: object) -> list[PoolNode]:
    return [PoolNode(f"{kind}{index}", node_kind=kind, **values) for index in range(number)]  # type: ignore[arg-type]


def trainer(name: str, gpu: float = 10.0, cpu: float = 1.0, **values: object) -> PlannedJob:
    """Make a trainer that scales linearly on both kinds."""
    curves = {GPU: ScalingCurve({1: gpu, 8: 8 * gpu}), CPU: ScalingCurve({1: cpu, 8: 8 * cpu})}
    values = {"min_nodes": 1, "max_nodes": 8, **values}
    return PlannedJob(name, curve=curves[CPU], curves=curves, **values)  # type: ignore[arg-type]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Pool, list[PlannedJob], dict[str, frozenset[str]]]:
    """Make problems of up to three trainers on up to three nodes of each of two kinds, some of them running."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = Pool([*nodes(GPU, int(rng.integers(0, 4))), *nodes(CPU, int(rng.integers(0, 4)))], horizon=HORIZON)
    trainers, current = [], {}
    free = {kind: [name for name in pool if pool[name].node_kind == kind] for kind in (GPU, CPU)}
    for index in range(int(rng.integers(1, 4))):
        least = int(rng.integers(1, 3))
        made = PlannedJob(
            f"t{index}",
            least,
            int(rng.integers(least, 4)),
            _curve(rng),
            CostsInSeconds(*rng.choice([0.0, 3.0, 40.0, 500.0], 3)),
            submitted=float(index),
            node_kinds=((), (), (GPU,), (CPU,), (GPU, CPU))[int(rng.integers(0, 5))],
            curves={} if rng.random() < 0.2 else {GPU: _curve(rng), CPU: _curve(rng)},
        )
        trainers.append(made)
        kind = made.node_kinds[0] if made.node_kinds else (GPU, CPU)[int(rng.integers(0, 2))]
        count = int(rng.integers(made.min_nodes, made.max_nodes + 1))
        if rng.random() < 0.6 and len(free[kind]) >= count:
            current[made.name] = frozenset(free[kind][:count])
            del free[kind][:count]
    return pool, trainers, current


def _curve(rng: np.random.Generator) -> ScalingCurve:
    return ScalingCurve(dict(zip((1, 2, 3), map(float, rng.choice([0.0, 1.0, 2.0, 5.0, 9.0], 3)), strict=True)))


def worth(
    trainers: list[PlannedJob], pool: Pool, before: dict[str, frozenset[str]], after: dict[str, tuple[str, int]]
) -> float:
    """Return the value of kinds and counts from the formula of each trainer, by ``throughput``."""
    objective = OBJECTIVES["throughput"]
    assert callable(objective)
    total = 0.0
    for one in trainers:
        was = next((pool[node].node_kind for node in before.get(one.name, ())), None)
        held = len(before.get(one.name, ()))
        kind, count = after.get(one.name, (was, 0))
        if kind is None:
            continue
        if was is not None and kind != was:
            total += value(objective, one.on_kind(was), held, 0, HORIZON)
        total += value(objective, one.on_kind(kind), held if kind == was else 0, count, HORIZON)
    return total


def best_by_enumeration(trainers: list[PlannedJob], pool: Pool, before: dict[str, frozenset[str]]) -> float:
    sizes = {kind: sum(node.node_kind == kind for node in pool.values()) for kind in (GPU, CPU)}
    choices = [
        [
            None,
            *((kind, n) for kind in (GPU, CPU) if one.may_use(kind) for n in range(1, 4) if one.may_have(n)),
        ]
        for one in trainers
    ]
    best = -math.inf
    for combination in itertools.product(*choices):
        after = {one.name: pair for one, pair in zip(trainers, combination, strict=True) if pair is not None}
        if all(sum(n for kind, n in after.values() if kind == of) <= sizes[of] for of in sizes):
            best = max(best, worth(trainers, pool, before, after))
    return best


@given(problems())
@settings(max_examples=150, deadline=None)
def test_milp_is_the_optimum_over_kinds_and_counts(
    problem: tuple[Pool, list[PlannedJob], dict[str, frozenset[str]]],
) -> None:
    pool, trainers, current = problem
    decision = allocate_over_kinds(MilpPolicy("throughput"), pool, trainers, current, 0.0)
    check_allocation(decision.allocation, pool, trainers)
    after = {name: (pool[next(iter(given))].node_kind, len(given)) for name, given in decision.allocation.items()}
    best = best_by_enumeration(trainers, pool, current)
    assert worth(trainers, pool, current, after) == pytest.approx(best, rel=1e-7, abs=1e-7)
    assert decision.objective == pytest.approx(best, rel=1e-7, abs=1e-7)
    assert decision.proven_optimal
    assert decision.bound >= best - 1e-6 * max(1.0, abs(best))


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(problem=problems())
@settings(max_examples=15, deadline=None)
def test_every_policy_gives_a_trainer_nodes_of_one_kind_that_it_may_use(
    name: str, problem: tuple[Pool, list[PlannedJob], dict[str, frozenset[str]]]
) -> None:
    pool, trainers, current = problem
    decision = allocate_over_kinds(POLICIES[name](), pool, trainers, current, 0.0)
    check_allocation(decision.allocation, pool, trainers)
    assert decision == replace(
        allocate_over_kinds(POLICIES[name](), pool, trainers, current, 0.0), solve_seconds=decision.solve_seconds
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_with_one_kind_the_policy_decides_as_before(name: str, seed: int) -> None:
    instance = random_instance(seed)
    alone = POLICIES[name]().allocate(instance.pool, instance.trainers, instance.current, instance.now)
    over = allocate_over_kinds(POLICIES[name](), instance.pool, instance.trainers, instance.current, instance.now)
    assert replace(over, solve_seconds=0.0) == replace(alone, solve_seconds=0.0)


@pytest.mark.parametrize("policy", [MilpPolicy(), WindowPolicy()])
def test_the_trainer_that_gains_more_gets_the_fast_nodes(policy: MilpPolicy | WindowPolicy) -> None:
    pool = Pool([*nodes(GPU, 2), *nodes(CPU, 2)])
    flexible, picky = trainer("flexible", gpu=2.0), trainer("picky", gpu=20.0)
    decision = allocate_over_kinds(policy, pool, [replace(flexible, max_nodes=2), replace(picky, max_nodes=2)], {}, 0.0)
    assert {pool[node].node_kind for node in decision.allocation["picky"]} == {GPU}
    assert {pool[node].node_kind for node in decision.allocation["flexible"]} == {CPU}


def test_a_move_between_kinds_must_pay_for_its_restart() -> None:
    pool = Pool([*nodes(GPU, 1), *nodes(CPU, 1)], horizon=100.0)
    current = {"a": frozenset({"cpu0"})}
    costs = {"dear": CostsInSeconds(down=30.0, start=80.0), "cheap": CostsInSeconds(down=5.0, start=5.0)}
    kinds = {}
    for word, cost in costs.items():
        one = trainer("a", gpu=1.5, max_nodes=1, costs=cost)
        (node,) = allocate_over_kinds(MilpPolicy(), pool, [one], current, 0.0).allocation["a"]
        kinds[word] = pool[node].node_kind
    assert kinds == {"dear": CPU, "cheap": GPU}


def test_nodes_that_close_soon_count_less_for_the_window_policy() -> None:
    closing = [*nodes(GPU, 1, closes=20.0), *nodes(CPU, 1)]
    one = trainer("a", gpu=2.0, max_nodes=1, costs=CostsInSeconds(1.0, 1.0, 10.0))
    pool = Pool(closing, horizon=1000.0)
    assert allocate_over_kinds(WindowPolicy(), pool, [one], {}, 0.0).allocation == {"a": frozenset({"cpu0"})}
    assert allocate_over_kinds(MilpPolicy(), pool, [one], {}, 0.0).allocation == {"a": frozenset({"gpu0"})}


def test_an_allocation_of_two_kinds_is_refused() -> None:
    pool = Pool([*nodes(GPU, 1), *nodes(CPU, 1)])
    with pytest.raises(PlanningError, match="several kinds: cpu, gpu"):
        check_allocation({"a": frozenset({"gpu0", "cpu0"})}, pool, [trainer("a")])
    with pytest.raises(PlanningError, match="of kind 'cpu', which it cannot use"):
        check_allocation({"a": frozenset({"cpu0"})}, pool, [trainer("a", node_kinds=(GPU,))])


def test_a_limit_to_one_kind_does_not_change_what_a_trainer_is_worth_there() -> None:
    free = trainer("a", gpu=10.0, cpu=1.0)
    limited = replace(free, node_kinds=(CPU,))
    speedup = OBJECTIVES["speedup"]
    assert callable(speedup)
    assert speedup(limited.on_kind(CPU), 2) == speedup(free.on_kind(CPU), 2) == pytest.approx(0.2)


# The planner.


def windows(now: float, **kinds: int) -> ev.WindowsSeen:
    seen = tuple(
        Window(tuple(f"{kind}{index}" for index in range(number)), now, None, node_kind=kind)
        for kind, number in kinds.items()
        if number
    )
    return ev.WindowsSeen(now, seen, terms_by_kind={CPU: BlockTerms(), GPU: BlockTerms(min_nodes=2)})


def requested(actions: ev.Actions) -> list[tuple[str, tuple[str, ...]]]:
    return [(a.window.node_kind, a.nodes) for a in actions if isinstance(a, ev.RequestBlock)]


def test_blocks_are_requested_on_nodes_of_the_kind_that_a_trainer_uses() -> None:
    planner = Planner(MilpPolicy())
    actions = planner.advance(ev.TrainerSubmitted(0.0, trainer("a", max_nodes=2)), windows(0.0, gpu=3, cpu=3))
    assert requested(actions) == [(GPU, ("gpu0", "gpu1"))]


def test_a_kind_has_terms_of_its_own() -> None:
    planner = Planner(MilpPolicy())
    actions = planner.advance(ev.TrainerSubmitted(0.0, trainer("a", max_nodes=2)), windows(0.0, gpu=1, cpu=2))
    assert requested(actions) == [(CPU, ("cpu0", "cpu1"))]  # a block needs two GPU nodes


def test_a_trainer_moves_to_better_nodes_and_the_others_are_released() -> None:
    planner = Planner(MilpPolicy(), PlannerSettings().in_seconds())
    (request,) = planner.advance(ev.TrainerSubmitted(0.0, trainer("a", max_nodes=2)), windows(0.0, cpu=2))
    assert isinstance(request, ev.RequestBlock)
    joined = ev.NodesJoined(9.0, request.block, tuple(PoolNode(name, 3600.0, node_kind=CPU) for name in request.nodes))
    planner.advance(ev.BlockStarted(9.0, request.block, request.nodes, 3600.0), joined)
    assert planner.assigned == {"a": frozenset({"cpu0", "cpu1"})}

    (better,) = planner.advance(windows(60.0, gpu=2))
    assert isinstance(better, ev.RequestBlock)
    assert better.window.node_kind == GPU
    joined = ev.NodesJoined(90.0, better.block, tuple(PoolNode(name, 3690.0, node_kind=GPU) for name in better.nodes))
    moved = planner.advance(ev.BlockStarted(90.0, better.block, better.nodes, 3690.0), joined)
    assert moved == [ev.Shrink("a", frozenset({"gpu0", "gpu1"}))]  # an exchange of all nodes
    released = planner.advance(ev.Tick(planner.wake_at(91.0)), ev.Tick(200.0))
    assert ev.ReleaseBlock(request.block) in released
    assert ev.ReleaseBlock(better.block) not in released
