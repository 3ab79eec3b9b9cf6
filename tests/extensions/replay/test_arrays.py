"""Arrays of a sweep: shares and costs computed by hand, arrangements against the exact grouping."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.replay.accounts import Account
from freetrain_parsl.extensions.replay.sweeps.arrays import ArrayAccount, Sweep, arrange, throughput
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob

FUSION = FusionCurve([(2, 1.6), (4, 2.0)])
MEMBER = PlannedJob("m", 1, 2, ScalingCurve({1: 10.0, 2: 15.0}), CostsInSeconds(up=5, down=3), work_left=100.0)

fusions = st.lists(st.tuples(st.integers(1, 3), st.integers(5, 40)), max_size=4).map(
    lambda steps: FusionCurve(
        [(1 + sum(more for more, _ in steps[: i + 1]), tenths / 10) for i, (_, tenths) in enumerate(steps)]
    )
)
"""Irregular curves of at most 13 members."""


def accounts(number: int) -> list[Account]:
    return [Account(MEMBER, 0.0, 0.5) for _ in range(number)]


@pytest.fixture
def array() -> ArrayAccount:
    """Return an array of four members on one node: 20 samples per second."""
    array = ArrayAccount.of("a", FUSION, accounts(4))
    assert array.start(frozenset("x"), 7.0, 0.0) == 0
    return array


def test_members_share_the_throughput(array: ArrayAccount) -> None:
    assert (array.rate, array.trainer.rate(2), array.work_left) == (20.0, 30.0, 400.0)
    assert array.done_at(7.0) == 27.0
    array.run(4.0)
    assert [member.samples for member in array.members] == [20.0] * 4
    assert [member.node_seconds for member in array.members] == [1.0] * 4
    assert [member.started for member in array.members] == [7.0] * 4


def test_a_change_costs_all_that_were_members_before(array: ArrayAccount) -> None:
    first, *others = array.members
    assert array.regroup(array.members[:2]) == 5 * 20 * 0.5
    assert (array.rate, first.rate, others[-1].rate) == (16.0, 8.0, 0.0)
    assert [member.samples for member in (first, *others)] == [-25.0] * 4
    assert array.preempt(frozenset("x")) == 3 * 16 * 0.5
    assert [member.samples for member in (first, *others)] == [-49.0, -49.0, -25.0, -25.0]
    assert (first.rate, first.preemptions, first.rescales) == (0.0, 1, 1)


def test_members_that_end_cost_nothing(array: ArrayAccount) -> None:
    array.take(array.members[:1])
    assert (array.rate, array.members[0].rate, array.members[0].samples) == (10.0, 10.0, 0.0)


def test_a_small_array_is_never_slower_than_one_by_one() -> None:
    curve = FusionCurve([(2, 0.5), (4, 2.0)])
    assert [throughput(curve, size) for size in range(5)] == [0.0, 1.0, 1.0, 1.25, 2.0]


def test_a_sweep_forms_arrays_and_gets_back_the_members_of_those_that_lost_their_nodes() -> None:
    sweep = Sweep("s", MEMBER, FUSION)
    members = accounts(9)
    sweep.waiting.extend(members)
    formed, changed, cost = sweep.rearrange(2, 1000.0)
    assert [array.trainer.name for array in formed] == ["s[1]", "s[2]"]
    assert [array.size for array in formed] == [4, 4]
    assert (changed, cost, len(sweep.waiting)) == ([], 0.0, 1)
    sweep.dissolve(formed[0])
    assert [id(member) for member in sweep.waiting] == [id(member) for member in [*members[:4], members[8]]]
    assert sweep.arrays == [formed[1]]


def test_members_that_move_train_on_in_the_other_array() -> None:
    arrays = [ArrayAccount.of(name, FUSION, accounts(size)) for name, size in (("a", 1), ("b", 4))]
    for array in arrays:
        array.start(frozenset(array.trainer.name), 0.0, 0.0)
    formed, changed, cost = Sweep("s", MEMBER, FUSION, arrays=[*arrays]).rearrange(2, 1000.0)
    assert (formed, changed, cost) == ([], arrays, 5 * (10 + 20) * 0.5)
    assert [array.size for array in arrays] == [2, 3]
    for array, rate in zip(arrays, (8.0, 6.0), strict=True):
        assert [member.rate for member in array.members] == pytest.approx([rate] * array.size)


@pytest.mark.parametrize(
    ("sizes", "waiting", "slots", "horizon", "wanted"),
    [
        ([4, 4], 4, 3, 1000.0, [4, 4, 4]),  # members that wait fill a free slot
        ([3], 1, 1, 1000.0, [4]),  # or join
        ([3], 1, 1, 20.0, [3]),  # if that pays within the horizon: 20 s of 0.2 against 5 s of 1.8
        ([4, 4], 0, 3, 1000.0, [4, 2, 2]),  # a free slot splits an array
        ([4, 4], 0, 3, 8.0, [4, 4]),
        ([4, 1], 0, 2, 1000.0, [3, 2]),  # the larger array gives members to the smaller one
        ([4, 1], 0, 2, 20.0, [4, 1]),
        ([], 3, 0, 1000.0, []),
    ],
)
def test_arrangements(sizes: list[int], waiting: int, slots: int, horizon: float, wanted: list[int]) -> None:
    assert arrange(FUSION, sizes, waiting, slots, horizon=horizon, pause=5.0) == wanted


def test_a_start_must_pay() -> None:
    """A third array adds 1.2, and loses 5 s of 1.6 and 5 s of 2.0."""
    assert arrange(FUSION, [4, 4], 0, 3, horizon=14.0, pause=5.0, start=5.0) == [4, 4]
    assert arrange(FUSION, [4, 4], 0, 3, horizon=16.0, pause=5.0, start=5.0) == [4, 2, 2]


def test_arrays_may_be_merged() -> None:
    curve = FusionCurve([(3, 0.5), (4, 3.0)])
    assert arrange(curve, [2, 2], 4, 2, horizon=100.0, pause=1.0) == [4, 4]
    assert arrange(curve, [2, 2], 0, 2, horizon=100.0, pause=1.0) == [4, 0]


@given(fusions, st.lists(st.integers(1, 6), max_size=4), st.integers(0, 8), st.integers(0, 4), st.integers(0, 30))
@settings(deadline=None)
def test_an_arrangement_is_the_best_if_changes_are_free_and_never_worse_than_none(
    fusion: FusionCurve, sizes: list[int], waiting: int, free: int, pause: int
) -> None:
    slots, horizon = len(sizes) + free, 60.0
    wanted = arrange(fusion, sizes, waiting, slots, horizon=horizon, pause=pause)
    assert min(wanted, default=0) >= 0
    assert sum(size > 0 for size in wanted) <= slots
    assert sum(wanted) <= sum(sizes) + waiting
    work = horizon * sum(throughput(fusion, size) for size in wanted)
    work -= sum(pause * throughput(fusion, size) for size, after in zip(sizes, wanted, strict=False) if size != after)
    assert work >= horizon * sum(throughput(fusion, size) for size in sizes) - 1e-6
    if not pause:
        best = sum(map(fusion, fusion.grouping(sum(sizes) + waiting, slots)))
        assert sum(throughput(fusion, size) for size in wanted) >= best - 1e-6
