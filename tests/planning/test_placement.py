"""Nodes for decided counts: no trainer is moved, and earliest-closing nodes are released first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.placement import check_allocation, current_counts, place

POOL = Pool([PoolNode("a", 100.0), PoolNode("b", 300.0), PoolNode("c"), PoolNode("d", 300.0), PoolNode("e", 200.0)])
CURVE = ScalingCurve({1: 1.0})


def nodes(text):
    return frozenset(text)


def test_grower_keeps_its_nodes_and_takes_the_free_ones_that_close_last():
    assert place({"t": 3}, POOL, {"t": nodes("a")}) == {"t": nodes("acb")}


def test_shrinker_gives_back_what_closes_first():
    assert place({"t": 2}, POOL, {"t": nodes("abce")}) == {"t": nodes("bc")}


def test_ties_go_by_node_name():
    assert place({"t": 1}, POOL, {"t": nodes("bd")}) == {"t": nodes("b")}


def test_what_a_shrinker_gives_back_a_grower_gets():
    assert place({"s": 1, "g": 4}, POOL, {"s": nodes("abcde")}) == {"s": nodes("c"), "g": nodes("abde")}


def test_who_is_left_out_or_gets_none_is_absent():
    assert place({"s": 0}, POOL, {"s": nodes("a"), "t": nodes("b")}) == {}


def test_nodes_outside_the_pool_are_lost():
    assert place({"t": 1}, POOL, {"t": nodes("xyz")}) == {"t": nodes("c")}
    trainers = [PlannedJob("t", 1, 4, CURVE), PlannedJob("u", 1, 4, CURVE)]
    assert current_counts(trainers, POOL, {"t": nodes("axy"), "gone": nodes("b")}) == {"t": 1, "u": 0}


@pytest.mark.parametrize(
    ("counts", "current", "message"),
    [
        ({"t": 4, "u": 2}, {}, "6 nodes are allocated, but the pool has 5"),
        ({"t": -1}, {}, "'t' cannot have -1 nodes"),
        ({"t": 1}, {"t": nodes("a"), "u": nodes("a")}, "'a' is held by both 't' and 'u'"),
    ],
)
def test_impossible_counts_are_refused(counts, current, message):
    with pytest.raises(PlanningError, match=message):
        place(counts, POOL, current)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_counts_are_met_exactly_and_nobody_is_moved(data):
    size = data.draw(st.integers(0, 10))
    pool = Pool(PoolNode(f"n{i}", data.draw(st.sampled_from([None, 1.0, 2.0]))) for i in range(size))
    owner = {name: data.draw(st.sampled_from(["", "t0", "t1", "t2"])) for name in [*pool, "x0", "x1"]}
    current = {t: frozenset(n for n, o in owner.items() if o == t) for t in ("t0", "t1", "t2")}
    counts, left = {}, size
    for trainer in ("t0", "t1", "t2"):
        counts[trainer] = data.draw(st.integers(0, left))
        left -= counts[trainer]
    placed = place(counts, pool, current)
    assert {t: len(n) for t, n in placed.items()} == {t: c for t, c in counts.items() if c}
    assert sum(map(len, placed.values())) == len(frozenset().union(*placed.values()))
    for trainer, after in placed.items():
        before = current[trainer] & pool.keys()
        assert after <= before or after >= before
        assert after <= pool.keys()


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ({"x": nodes("a")}, "unknown trainer 'x'"),
        ({"t": nodes("az")}, "'t' got node 'z', which is not in the pool"),
        ({"t": nodes("a")}, "'t' takes 2 to 3 nodes, got 1"),
        ({"t": nodes("abcd")}, "'t' takes 2 to 3 nodes, got 4"),
        ({"t": nodes("")}, "'t' takes 2 to 3 nodes, got 0"),
        ({"t": nodes("ab"), "u": nodes("bc")}, "'b' is assigned to both 't' and 'u'"),
    ],
)
def test_allocations_that_break_the_contract_are_refused(allocation, message):
    with pytest.raises(PlanningError, match=message):
        check_allocation(allocation, POOL, [PlannedJob("t", 2, 3, CURVE), PlannedJob("u", 1, 4, CURVE)])


def test_good_allocation_passes():
    check_allocation({"u": nodes("abcd")}, POOL, [PlannedJob("t", 2, 3, CURVE), PlannedJob("u", 1, 4, CURVE)])
