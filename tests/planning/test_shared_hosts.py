"""Jobs that share nodes: sizes, exact counts with moves, placement, and the planner's slots; against exact oracles."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.places import node_of, slot_place
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode, Window
from freetrain_parsl.planning.placement import SharedHosts, check_allocation, place
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.baselines import EqualSharePolicy
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.policies.window import WindowPolicy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.planning.sizes import are_sizes, room, round_down, round_up, sizes_within, wanted
from freetrain_parsl.planning.solvers.shared_hosts import Parts, maximise_on_hosts
from tests.planning.small_events import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SLOTS = st.sampled_from([2, 3, 4, 6, 8, 12])
LINEAR = ScalingCurve({1: 1.0, 64: 64.0})


def pool_of(*slots: int, per_host: int = 4, closes: Sequence[float | None] = ()) -> Pool:
    """Make hosts h0, h1, … with these numbers of slots in the pool."""
    ends = list(closes) or [None] * len(slots)
    return Pool(
        (
            PoolNode(slot_place(f"h{host}", lane), closes=ends[host], host=f"h{host}")
            for host, number in enumerate(slots)
            for lane in range(number)
        ),
        slots_per_host=per_host,
    )


def on(allocation: Mapping[str, frozenset[str]], name: str) -> list[str]:
    return sorted(map(node_of, allocation[name]))


@pytest.mark.parametrize(
    ("slots", "sizes"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 6)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 12))]
)
def test_sizes_are_a_chain_of_divisors(slots: int, sizes: tuple[int, ...]) -> None:
    assert sizes_within(slots) == sizes


@given(SLOTS, st.integers(1, 60))
def test_rounding_gives_the_nearest_sizes(slots: int, count: int) -> None:
    sizes = [n for n in range(1, 100) if are_sizes(np.array([n]), slots)[0]]
    assert round_down(count, slots) == max(n for n in sizes if n <= count)
    assert round_up(count, slots) == min(n for n in sizes if n >= count)


def packings(sizes: Sequence[int], free: tuple[int, ...], slots: int) -> bool:
    """Return whether jobs of these sizes fit, by trying every host for each: no size is larger than a node."""
    if not sizes:
        return True
    return any(
        packings(sizes[1:], (*free[:host], left - sizes[0], *free[host + 1 :]), slots)
        for host, left in enumerate(free)
        if left >= sizes[0]
    )


@given(st.data(), st.sampled_from([4, 6, 8]))
def test_jobs_fit_if_and_only_if_there_is_room_for_each_size(data: st.DataObject, slots: int) -> None:
    free = tuple(data.draw(st.lists(st.integers(0, slots), min_size=1, max_size=3)))
    jobs = data.draw(st.lists(st.sampled_from(sizes_within(slots)), max_size=6))
    fits = bool((wanted(np.array(jobs, dtype=np.int64), slots) <= room(free, slots)).all())
    assert fits == packings(jobs, free, slots)


def layouts(slots: int, free: Sequence[int]) -> Iterator[dict[int, int]]:
    """Yield everything that a job may have: nothing, a size on one host, or whole hosts."""
    yield {}
    for size in sizes_within(slots)[:-1]:
        yield from ({host: size} for host in range(len(free)))
    whole = [host for host, number in enumerate(free) if number == slots]
    for number in range(1, len(whole) + 1):
        yield from (dict.fromkeys(hosts, slots) for hosts in combinations(whole, number))


def best_value(values: np.ndarray, parts: Parts, move_costs: np.ndarray, row: int, left: tuple[int, ...]) -> float:
    """Return the value of the best layouts of the jobs from `row` on, by trying all."""
    if row == len(values):
        return 0.0
    best = -np.inf
    for layout in layouts(parts.slots, parts.free):
        count = sum(layout.values())
        if count >= values.shape[1] or not np.isfinite(values[row, count]):
            continue
        rest = tuple(number - layout.get(host, 0) for host, number in enumerate(left))
        if min(rest) < 0:
            continue
        host = int(parts.host[row])
        moves = host >= 0 and count == parts.sizes[row] and layout.get(host) != count
        value = values[row, count] - (move_costs[row] if moves else 0.0)
        best = max(best, value + best_value(values, parts, move_costs, row + 1, rest))
    return best


def problem(seed: int) -> tuple[np.ndarray, np.ndarray, Parts, np.ndarray]:
    """Make values, current counts, parts and costs of moves at random."""
    rng = np.random.default_rng(seed)
    slots, jobs = int(rng.choice([2, 4, 6])), int(rng.integers(1, 5))
    free = np.array(
        [slots if rng.random() < 0.6 else int(rng.integers(1, slots + 1)) for _ in range(rng.integers(1, 4))]
    )
    left, host, current = free.copy(), np.full(jobs, -1), np.zeros(jobs, dtype=np.int64)
    for row in range(jobs):
        size = int(rng.choice(sizes_within(slots)[:-1]))
        with_room = np.flatnonzero(left >= size)
        if len(with_room) and rng.random() < 0.7:
            host[row], current[row] = int(rng.choice(with_room)), size
            left[host[row]] -= size
    number = int(free.sum())
    values = np.full((jobs, number + 1), -np.inf)
    sizes = are_sizes(np.arange(number + 1), slots)
    for row in range(jobs):
        gains = rng.uniform(-0.2, 1.0, number).cumsum() if rng.random() < 0.5 else rng.uniform(0.0, 3.0, number)
        values[row, sizes] = np.concatenate([[0.0], 10.0 * gains])[sizes]
    return values, current, Parts(slots, free, host, current.copy()), rng.uniform(0.0, 3.0, jobs)


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_counts_and_moves_are_those_of_the_oracle_over_slots(first: int) -> None:
    for seed in range(first, first + 40):
        values, current, parts, move_costs = problem(seed)
        solution = maximise_on_hosts(values, current, parts, move_costs)
        assert solution.is_proven, seed
        best = best_value(values, parts, move_costs, 0, tuple(parts.free.tolist()))
        assert solution.objective == pytest.approx(best, abs=1e-6), seed


def test_a_job_moves_only_where_that_gains_more_than_it_costs() -> None:
    """Two jobs of one slot block two hosts of two; a third could have a whole one."""
    pool = pool_of(2, 2, per_host=2)
    current = {"a": frozenset({"h0/0"}), "b": frozenset({"h1/0"})}

    def allocate(cost: float) -> Mapping[str, frozenset[str]]:
        costs = CostsInSeconds(up=cost, down=cost)
        jobs = [PlannedJob(name, 1, 1, LINEAR, costs) for name in "ab"]
        jobs.append(PlannedJob("large", 2, 2, ScalingCurve({2: 1.0})))
        return MilpPolicy().allocate(pool, jobs, current, 0.0).allocation

    moved = allocate(1.0)
    assert on(moved, "large") in (["h0", "h0"], ["h1", "h1"])
    assert sum(moved[name] == current[name] for name in "ab") == 1  # one moves, not both
    assert allocate(1000.0) == current


def test_the_job_whose_move_costs_least_moves() -> None:
    pool = pool_of(2, 2, per_host=2)
    current = {"a": frozenset({"h0/0"}), "b": frozenset({"h1/0"})}
    placed = place({"a": 1, "b": 1, "large": 2}, pool, current, {"a": 5.0, "b": 2.0})
    assert placed["a"] == {"h0/0"}
    assert on(placed, "b") == ["h0"]
    assert on(placed, "large") == ["h1", "h1"]


def test_small_jobs_take_the_hosts_that_close_last_and_fill_them() -> None:
    pool = pool_of(4, 4, 4, closes=[100.0, 900.0, 900.0])
    placed = place(dict.fromkeys("abcde", 1), pool, {})
    hosts = [on(placed, name)[0] for name in "abcde"]
    assert hosts == ["h1"] * 4 + ["h2"]


def test_a_job_that_shrinks_or_grows_keeps_slots_where_it_is() -> None:
    pool = pool_of(4, 4)
    shrunk = place({"t": 2}, pool, {"t": frozenset(slot_place("h1", lane) for lane in range(4))})
    assert on(shrunk, "t") == ["h1", "h1"]
    assert place({"t": 4}, pool, shrunk)["t"] == {slot_place("h1", lane) for lane in range(4)}
    grown = place({"t": 8}, pool, shrunk)
    assert len(grown["t"]) == 8


@pytest.mark.parametrize("policy", [MilpPolicy(), WindowPolicy(), EqualSharePolicy()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(8))
def test_policies_give_sizes_inside_a_host_or_whole_hosts(
    policy: MilpPolicy | WindowPolicy | EqualSharePolicy, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pool = pool_of(*rng.integers(1, 5, size=4).tolist())
    jobs = [
        PlannedJob(f"t{number}", low := int(rng.choice([1, 1, 2, 3])), low + int(rng.integers(0, 8)), LINEAR)
        for number in range(6)
    ]
    current: Mapping[str, frozenset[str]] = {}
    for _ in range(3):
        current = policy.allocate(pool, jobs, current, 0.0).allocation
        check_allocation(current, pool, jobs)
        assert current


def test_layouts_that_straddle_hosts_are_refused() -> None:
    pool = pool_of(4, 4)
    jobs = [PlannedJob("t", 1, 8, LINEAR)]
    for slots in ({"h0/0", "h1/0"}, {"h0/0", "h0/1", "h0/2"}, {f"h0/{n}" for n in range(4)} | {"h1/0"}):
        with pytest.raises(PlanningError, match="a trainer takes 1, 2, 4 slots of one host, or whole hosts"):
            check_allocation({"t": frozenset(slots)}, pool, jobs)
        check_allocation({"t": frozenset(slots)}, pool, jobs, any_layout=True)
    assert SharedHosts(pool, {"t": frozenset({"h0/0", "h0/3"})}).is_laid_out("t")


def test_counts_that_do_not_fit_are_refused_in_a_sentence() -> None:
    with pytest.raises(PlanningError, match="do not fit on these hosts of 4 slots"):
        place({"large": 4}, pool_of(3, 3), {})
    with pytest.raises(PlanningError, match="`as_sizes` rounds them"):
        place({"odd": 3}, pool_of(3, 3), {})


def test_a_job_grows_once_for_all_slots_of_a_node_that_join_one_by_one() -> None:
    planner = Planner(MilpPolicy(), PlannerSettings().in_seconds(), slots_per_node=4)
    planner.advance(ev.TrainerSubmitted(0.0, PlannedJob("a", 1, 4, LINEAR)))
    actions = planner.advance(ev.WindowsSeen(0.0, (Window(("n0",), 0.0, None),)))
    (block,) = [action.block for action in actions if isinstance(action, ev.RequestBlock)]
    planner.advance(ev.BlockStarted(1.0, block, ("n0",), 3000.0))
    sizes = []
    for lane in range(4):
        joined = PoolNode(slot_place("n0", lane), 3000.0, host="n0")
        planner.advance(ev.NodesJoined(2.0 + 0.1 * lane, block, (joined,)))
        sizes.append(len(planner.assigned["a"]))
    assert sizes == [1, 1, 1, 4]


def test_the_planner_requests_nodes_and_allocates_slots() -> None:
    settings = PlannerSettings().in_seconds()
    planner = Planner(MilpPolicy(), settings, slots_per_node=4)
    jobs = [PlannedJob(name, 1, 1, LINEAR) for name in "abcde"]
    window = Window(("n0", "n1", "n2"), 0.0, None)
    actions = planner.advance(*(ev.TrainerSubmitted(0.0, job) for job in jobs), ev.WindowsSeen(0.0, (window,)))
    requests = [action for action in actions if isinstance(action, ev.RequestBlock)]
    assert sum(len(request.nodes) for request in requests) == 2  # five slots
    (request,) = requests
    planner.advance(ev.BlockStarted(1.0, request.block, request.nodes, 3000.0))
    for node in request.nodes:
        slots = tuple(PoolNode(slot_place(node, lane), 3000.0, host=node) for lane in range(4))
        planner.advance(ev.NodesJoined(2.0, request.block, slots))
    assert sorted(planner.assigned) == list("abcde")
    assert all(len(slots) == 1 for slots in planner.assigned.values())
    # A slot is lost: only its job is moved, and no block is given up.
    before = dict(planner.assigned)
    actions = planner.advance(ev.NodesLeft(3.0, tuple(before["a"])))
    assert {action.trainer for action in actions if isinstance(action, ev.Reassign)} == {"a"}
    assert not any(isinstance(action, ev.ReleaseBlock) for action in actions)
    # A node closes: all its jobs leave in one decision.
    closing = node_of(next(iter(before["b"])))
    actions = planner.advance(ev.NodesClosing(4.0, (closing,), 5.0))
    leaving = {name for name, slots in before.items() if name != "a" and node_of(next(iter(slots))) == closing}
    assert leaving <= {action.trainer for action in actions if isinstance(action, ev.Reassign)}
    assert all(node_of(slot) != closing for slots in planner.assigned.values() for slot in slots)


def closing_soon(*jobs: PlannedJob) -> Planner:
    """Let jobs run on one node of four slots that closes at 500 s."""
    planner = Planner(MilpPolicy("throughput"), replace(SETTINGS, closing_margin=5.0), slots_per_node=4)
    nodes = tuple(PoolNode(slot_place("n0", lane), closes=500.0, host="n0") for lane in range(4))
    planner.advance(ev.NodesJoined(0.0, "b", nodes), *(ev.TrainerSubmitted(0.0, job) for job in jobs))
    assert planner.assigned.keys() == {job.name for job in jobs}
    return planner


def test_jobs_that_save_together_leave_a_closing_node_early_enough_for_all() -> None:
    """The margin is for one of them, the others add their 20 s; nobody returns to the node then."""
    planner = closing_soon(*(PlannedJob(f"t{i}", 1, 1, LINEAR, save_seconds=20.0) for i in range(4)))
    assert planner.wake_at(400.0) == 435.0
    assert planner.advance(ev.Tick(434.0)) == []
    assert sorted(action.trainer for action in planner.advance(ev.Tick(435.0))) == ["t0", "t1", "t2", "t3"]
    assert planner.advance(ev.TrainerSubmitted(440.0, PlannedJob("t4", 1, 1, LINEAR))) == []
    assert planner.assigned == {}


def test_a_job_without_neighbours_leaves_a_closing_node_at_the_margin() -> None:
    assert closing_soon(PlannedJob("t", 4, 4, LINEAR, save_seconds=20.0)).wake_at(400.0) == 495.0
    assert closing_soon(PlannedJob("t", 1, 1, LINEAR, save_seconds=20.0)).wake_at(400.0) == 495.0
