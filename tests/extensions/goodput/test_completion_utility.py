"""The objective of SMD: utilities of completion times, restarts included."""

from __future__ import annotations

import math

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.goodput.completion import CompletionUtility
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import Moment, at_moment, objective_table, resolve_objective
from freetrain_parsl.planning.policies import MilpPolicy


def job(name="a", **fields):
    settings = {"work_left": 1000.0, "deadline": 200.0, "costs": CostsInSeconds(up=30, down=20, start=10), **fields}
    return PlannedJob(name, 1, 4, ScalingCurve({1: 10, 4: 40}), **settings)


def utility(seconds, deadline, steepness):
    return 1 / (1 + math.exp(steepness * (seconds / deadline - 1)))


def test_utility_is_that_of_the_completion_time_with_the_change():
    """On 2 nodes now: 4 s per 40 samples on 1 node after 20 s, and so on."""
    moment = Moment([job()], {"a": 2}, 4, 50.0)
    table = objective_table(at_moment(CompletionUtility(3.0), moment), job(), 4)
    expected = [0.0, 50 + 20 + 100, 50 + 50, 50 + 30 + 1000 / 30, 50 + 30 + 25]
    assert table[0] == 0
    assert table[1:] == pytest.approx([utility(seconds, 200, 3.0) for seconds in expected[1:]])


@pytest.mark.parametrize("fields", [{"deadline": None}, {"work_left": math.inf}])
def test_without_deadline_or_work_a_trainer_is_worth_nothing(fields):
    trainer = job(**fields)
    table = objective_table(at_moment(CompletionUtility(), Moment([trainer], {}, 4, 0.0)), trainer, 4)
    assert not table.any()


def test_late_jobs_still_run():
    """A job far beyond its deadline is worth more than idle nodes."""
    pool = Pool([PoolNode("n0"), PoolNode("n1")])
    counts = MilpPolicy("completion-utility").allocate(pool, [job(deadline=1.0)], {}, 1e6).counts
    assert counts.get("a", 0) >= 1


def test_objectives_are_found_by_name():
    for name in ("completion-time", "completion-utility"):
        assert resolve_objective(name)


@pytest.mark.parametrize("steepness", [0.0, -1.0, math.nan])
def test_wrong_steepness_is_refused(steepness):
    with pytest.raises(InvalidSettings, match="steepness must be positive"):
        CompletionUtility(steepness)
