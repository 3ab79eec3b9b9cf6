"""The published baseline, against results computed by hand."""

from __future__ import annotations

from datetime import timedelta

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.policies import EqualSharePolicy


def share(nodes, *bounds):
    trainers = [
        PlannedJob(f"t{i}", low, high, ScalingCurve({1: 1.0}), submitted=float(i))
        for i, (low, high) in enumerate(bounds)
    ]
    counts = EqualSharePolicy().allocate(Pool(PoolNode(f"n{i:02}") for i in range(nodes)), trainers, {}, 0.0).counts
    return [counts.get(trainer.name, 0) for trainer in trainers]


@pytest.mark.parametrize(
    ("nodes", "bounds", "expected"),
    [
        (9, [(1, 9), (1, 9), (1, 9)], [3, 3, 3]),
        (11, [(1, 9), (1, 9), (1, 9)], [5, 3, 3]),  # the rest goes to the first
        (11, [(1, 4), (1, 9), (1, 9)], [4, 4, 3]),  # up to its maximum
        (9, [(1, 2), (1, 9), (1, 9)], [2, 4, 3]),
        (9, [(4, 9), (1, 9), (1, 9)], [0, 6, 3]),  # a share below the minimum counts as zero, and the rest is too small
        (9, [(3, 9), (1, 9), (1, 9)], [3, 3, 3]),  # also zero if equal to it, as published; but it gets the rest
        (10, [(4, 5), (1, 3), (1, 3)], [4, 3, 3]),  # it needs all of the rest
        (8, [(1, 2), (3, 9), (1, 9)], [2, 4, 2]),
        (2, [(1, 9), (1, 9), (1, 9)], [2, 0, 0]),  # all shares are zero: first come, first served
        (3, [(4, 9), (2, 2), (1, 9)], [0, 2, 1]),  # a trainer that needs more than there is does not block the others
    ],
)
def test_shares(nodes, bounds, expected):
    assert share(nodes, *bounds) == expected


def test_first_come_is_by_submission_not_by_position():
    early, late = (PlannedJob(n, 1, 9, ScalingCurve({1: 1.0}), submitted=s) for n, s in (("z", 1.0), ("a", 2.0)))
    pool = Pool(PoolNode(f"n{i}") for i in range(5))
    assert EqualSharePolicy().allocate(pool, [late, early], {}, 0.0).counts == {"z": 3, "a": 2}


def test_objective_is_in_the_common_value_model():
    trainer = PlannedJob("t", 1, 2, ScalingCurve({1: 10.0, 2: 15.0}), CostsInSeconds(up=4.0))
    pool = Pool([PoolNode("a"), PoolNode("b")])
    decision = EqualSharePolicy("throughput", horizon=timedelta(seconds=60)).allocate(
        pool, [trainer], {"t": frozenset("a")}, 0.0
    )
    assert decision.objective == 60 * 15 - 4 * 10
    assert decision.bound == decision.objective
    assert not decision.proven_optimal


def test_horizon_must_be_positive():
    with pytest.raises(InvalidSettings, match="horizon"):
        EqualSharePolicy(horizon=timedelta(0))
