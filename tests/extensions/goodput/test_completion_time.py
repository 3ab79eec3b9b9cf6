"""The objective for completion times: its formula, its costs of changes, and the exact optimum over counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.goodput.completion import CompletionTime, Urgency
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import Moment, at_moment, value_table, without_own_costs
from freetrain_parsl.planning.policies import MilpPolicy, WindowPolicy

COSTS = CostsInSeconds(up=30.0, down=30.0, start=30.0)
TRAINER = PlannedJob("t", 1, 4, ScalingCurve({1: 10.0, 2: 18.0, 4: 30.0}), COSTS, work_left=5000.0)


def values(objective, trainer, held, nodes=4):
    worth = at_moment(objective, Moment([trainer], {trainer.name: held} if held else {}, nodes, 0.0))
    return value_table(worth, trainer, held, nodes, 1.0)


def test_values_are_those_of_the_formula():
    """Speed-ups to the power 0.65 over 0.65, less 30 of 180 s if the count changes, times 500 s to the power -0.3."""
    speedups = np.array([0, 1, 1.8, 2.4, 3.0])
    kept = np.array([5 / 6, 5 / 6, 1, 5 / 6, 5 / 6])
    expected = (speedups * kept) ** 0.65 / 0.65 * 500**-0.3
    assert values(CompletionTime(), TRAINER, 2) == pytest.approx(expected)


def test_a_start_is_charged_too():
    assert values(CompletionTime(preference=0.0), TRAINER, 0)[1] == pytest.approx((5 / 6) ** 0.65 / 0.65)


def test_changes_longer_than_the_horizon_are_worth_nothing():
    table = values(CompletionTime(horizon=20.0), TRAINER, 2)
    assert table[2] > 0
    assert not table[[1, 3, 4]].any()


def test_little_work_is_urgent_and_unknown_work_is_equally_so():
    short, long, unknown = (replace(TRAINER, work_left=work) for work in (50.0, 5e6, float("inf")))
    objective = CompletionTime()
    assert values(objective, short, 1)[1] > values(objective, long, 1)[1]
    assert values(objective, unknown, 1)[1] == values(objective, replace(unknown, name="u"), 1)[1]


def test_attained_service_lowers_the_urgency():
    objective = CompletionTime.knowing(Urgency.SERVICE)
    young, old = TRAINER, replace(TRAINER, service=36_000.0)
    assert values(objective, young, 1)[1] > values(objective, old, 1)[1]
    assert values(objective, old, 1)[1] == values(objective, replace(old, work_left=1.0), 1)[1]


def test_the_weight_of_a_job_rises_with_its_age_beyond_ten_thousand_seconds():
    objective = CompletionTime(aging=0.5)

    def value(now):
        return value_table(at_moment(objective, Moment([TRAINER], {}, 4, now)), TRAINER, 0, 4, 1.0)[1]

    assert value(9_999.0) == value(0.0) == values(CompletionTime(), TRAINER, 0)[1]
    assert value(40_000.0) == pytest.approx(2 * value(0.0))


def test_knowing_nothing_work_and_service_do_not_matter():
    objective = CompletionTime.knowing(Urgency.NONE)
    other = replace(TRAINER, service=1e6, work_left=1.0)
    assert values(objective, TRAINER, 2) == pytest.approx(values(objective, other, 2))


@st.composite
def decisions(draw):
    """Draw a small pool, trainers with arbitrary curves, and what they have."""
    nodes = draw(st.integers(1, 5))
    trainers, current, free = [], {}, [f"n{i}" for i in range(nodes)]
    for number in range(draw(st.integers(1, 3))):
        most = draw(st.integers(1, 5))
        rates = draw(st.lists(st.floats(0.1, 20.0), min_size=most, max_size=most))
        work = draw(st.floats(1.0, 1e6))
        curve = ScalingCurve(enumerate(rates, start=1))
        trainers.append(PlannedJob(f"t{number}", 1, most, curve, COSTS, work_left=work, service=work))
        held = draw(st.integers(0, min(most, len(free))))
        if held:
            current[f"t{number}"] = frozenset(free[:held])
            free = free[held:]
    return Pool(PoolNode(f"n{i}") for i in range(nodes)), trainers, current


@given(decisions(), st.sampled_from(Urgency))
def test_the_count_model_finds_the_optimum(case, urgency):
    """No counts are worth more than those of the policy, by enumeration."""
    pool, trainers, current = case
    objective = CompletionTime.knowing(urgency)
    held = {name: len(nodes) for name, nodes in current.items()}
    worth = at_moment(objective, Moment(trainers, held, len(pool), 0.0))
    tables = [value_table(worth, t, held.get(t.name, 0), len(pool), pool.horizon) for t in trainers]
    best = max(
        sum(table[count] for table, count in zip(tables, counts, strict=True))
        for counts in product(range(len(pool) + 1), repeat=len(trainers))
        if sum(counts) <= len(pool)
    )
    decision = MilpPolicy(objective).allocate(pool, trainers, current, 0.0)
    assert decision.objective == pytest.approx(best)
    got = sum(table[decision.counts.get(t.name, 0)] for table, t in zip(tables, trainers, strict=True))
    assert got == pytest.approx(best)


def test_on_shared_hosts_counts_are_parts_of_one_or_whole_hosts():
    pool = Pool(PoolNode(f"h{i}/{j}", host=f"h{i}") for i in range(4) for j in range(4))
    curve = ScalingCurve({1: 1.0, 16: 16.0})
    trainers = [PlannedJob(f"t{i}", 1, most, curve) for i, most in enumerate((3, 6, 7, 16))]
    counts = MilpPolicy(CompletionTime()).allocate(pool, trainers, {}, 0.0).counts
    assert sum(counts.values()) <= 16
    assert all(count <= 4 or count % 4 == 0 for count in counts.values())


def test_a_trainer_of_no_size_gets_nothing():
    pool = Pool(PoolNode(f"h{i}/{j}", host=f"h{i}") for i in range(2) for j in range(4))
    counts = MilpPolicy().allocate(pool, [PlannedJob("t", 6, 6, ScalingCurve({1: 1.0, 6: 6.0}))], {}, 0.0).counts
    assert counts == {}


def test_policies_with_costs_of_their_own_take_the_gross_objective():
    worth = at_moment(CompletionTime(), Moment([TRAINER], {"t": 2}, 4, 0.0))
    assert without_own_costs(worth)(TRAINER, 4) > worth(TRAINER, 4)
    pool = Pool(PoolNode(f"n{i}") for i in range(4))
    assert WindowPolicy(CompletionTime()).allocate(pool, [TRAINER], {}, 0.0).counts == {"t": 4}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("fairness", 1.0), ("fairness", -0.1), ("preference", -1.0), ("horizon", 0.0), ("aging", -0.1)],
)
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(InvalidSettings, match=f"'completion-time': {setting}"):
        CompletionTime(**{setting: value})
