"""The data model: validation and derived values."""

from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidApp, PlanningError
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import (
    CostsInSeconds,
    Decision,
    PlannedJob,
    Pool,
    PoolNode,
    Window,
    moved_shares,
)

CURVE = ScalingCurve({2: 100.0, 4: 150.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"min_nodes": 0}, "min_nodes must be at least 1"),
        ({"max_nodes": 1}, r"max_nodes \(1\) is less than min_nodes \(2\)"),
        ({"min_nodes": 1}, "curve starts at 2; add"),
        ({"work_left": -1.0}, "work_left"),
        ({"work_left": math.nan}, "work_left"),
        ({"priority": 0.0}, "priority"),
        ({"priority": math.inf}, "priority"),
    ],
)
def test_trainer_that_cannot_run_is_refused(changes, message):
    good = {"name": "t", "min_nodes": 2, "max_nodes": 4, "curve": CURVE}
    PlannedJob(**good)
    with pytest.raises(InvalidApp, match=message):
        PlannedJob(**good | changes)


@pytest.mark.parametrize("field", ["up", "down", "start"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_rescale_costs_are_finite_seconds(field, value):
    with pytest.raises(InvalidApp, match=f"'{field}'"):
        CostsInSeconds(**{field: value})


def _busiest(before: int, after: int) -> float:
    """Return the most that a node moves if all keep what overlaps most: by trying who has which part on each side."""
    fewer, more = sorted((before, after))

    def overlap(one: int, other: int) -> float:
        return max(0.0, min((one + 1) / fewer, (other + 1) / more) - max(one / fewer, other / more))

    kept = max(([overlap(i, j) for i, j in enumerate(parts)] for parts in permutations(range(more), fewer)), key=sum)
    return max(1 / more, *(max(1 / fewer, 1 / more) - part for part in kept))


@pytest.mark.parametrize(("before", "after"), [p for p in product(range(1, 7), repeat=2) if p[0] != p[1]])
def test_a_change_of_shards_moves_what_does_not_overlap(before, after):
    assert moved_shares(before, np.array([after]))[0] == pytest.approx(_busiest(before, after))


def test_a_change_costs_more_the_more_it_moves():
    costs = CostsInSeconds(2.0, 1.0, 9.0, sharded_bytes=24e9, bandwidth=2e9)
    assert costs.changes(2, 4).tolist() == pytest.approx([1.0, 1.0 + 12 / 2, 0.0, 2.0 + 12 / 3, 2.0 + 12 / 4])
    whole = CostsInSeconds(2, 1, 9, sharded_bytes=24e9, bandwidth=2e9)
    assert whole.changes(2, 4).tolist() == costs.changes(2, 4).tolist()
    assert CostsInSeconds(2.0, 1.0, 9.0).changes(2, 4).tolist() == [1.0, 1.0, 0.0, 2.0, 2.0]


def test_trainer_is_a_value():
    first, second = PlannedJob("t", 2, 4, CURVE), PlannedJob("t", 2, 4, ScalingCurve({2: 100.0, 4: 150.0}))
    assert hash(first) == hash(second)
    assert first == second
    assert first.rate(3) == 125.0


def test_window_sorts_its_nodes_and_knows_what_remains():
    window = Window(("b", "a"), opens=10.0, closes=100.0)
    assert window.nodes == ("a", "b")
    assert window.remaining(40.0) == 60.0
    assert Window(("a",), opens=0.0, closes=None).remaining(40.0) == math.inf


@pytest.mark.parametrize(("nodes", "closes"), [((), 100.0), (("a", "a"), 100.0), (("a",), 10.0), (("a",), 5.0)])
def test_impossible_windows_are_refused(nodes, closes):
    with pytest.raises(PlanningError, match="a window"):
        Window(nodes, opens=10.0, closes=closes)


def test_pool_is_in_order_of_name():
    pool = Pool([PoolNode("b", 5.0), PoolNode("a")])
    assert list(pool) == ["a", "b"]
    assert [node.closes_or_inf for node in pool.values()] == [math.inf, 5.0]
    assert "b" in pool
    assert len(pool) == 2
    assert "PoolNode(name='a'" in repr(pool)


def test_counts_of_a_decision():
    decision = Decision({"t": frozenset("ab")}, 1.0, proven_optimal=True, bound=1.0)
    assert decision.counts == {"t": 2}
