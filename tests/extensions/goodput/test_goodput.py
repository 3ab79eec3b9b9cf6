"""Goodput curves: division of batches, the best plan by enumeration, and models learned from measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.extensions.goodput.curve import BatchLimits, BatchPlan, GoodputProfile, GradientNoise, steps_worth

LIMITS = BatchLimits(initial=32, largest=512, least_local=8, most_local=64)
NOISE = GradientNoise(square=1.0, variance=4.0)
PLACEMENTS = st.tuples(st.integers(1, 4), st.integers(1, 16)).map(lambda drawn: (drawn[0] * drawn[1], drawn[1]))


@given(st.integers(1, 600), st.integers(1, 64))
def test_plans_are_within_their_limits(batch, nodes):
    """No pass exceeds a node's memory, and no batch the largest one, unless one sample a node already does."""
    local, passes = LIMITS.plan(min(batch, LIMITS.largest), nodes)
    assert 1 <= local <= LIMITS.most_local
    assert nodes * local * passes <= max(LIMITS.largest, nodes)
    assert passes >= 2 or nodes > 1 or batch <= LIMITS.initial


def test_a_step_of_the_initial_batch_is_worth_one_and_no_step_more_than_its_size():
    batches = np.array([32.0, 64.0, 512.0])
    worth = steps_worth(batches, 32, NOISE.square, NOISE.variance)
    assert worth[0] == 1
    assert (worth <= batches / 32).all()
    assert steps_worth(batches, 32, 0.0, 1.0) == pytest.approx(batches / 32)  # pure noise: all samples count


def _measured(*passes):
    """Return a profile of passes (nodes, hosts, samples, computing, exchange)."""
    profile = GoodputProfile()
    for nodes, hosts, local, compute, exchange in passes:
        profile.observe(nodes, hosts, local, compute + exchange, exchange)
    return profile


def times(profile, nodes, hosts, local):
    step, exchange = profile.times(nodes, hosts)(np.array([float(local)]))[:, 0]
    return step - exchange, exchange


@given(
    st.dictionaries(
        st.tuples(PLACEMENTS, st.integers(1, 64)),
        st.tuples(st.floats(1e-3, 100.0), st.floats(0.0, 100.0)),
        min_size=1,
        max_size=12,
    )
)
def test_every_measurement_is_reproduced_whatever_was_measured_elsewhere(measured):
    """Computing is slower where nodes share a host, and an exchange is partly hidden behind a long one."""
    passes = {
        (*placement, local): (compute, exchange if placement != (1, 1) else 0.0)
        for (placement, local), (compute, exchange) in measured.items()
    }
    profile = _measured(*(where + seconds for where, seconds in passes.items()))
    for where, seconds in passes.items():
        assert times(profile, *where) == pytest.approx(seconds, abs=1e-9)


def test_the_last_measurement_counts():
    profile = _measured((2, 1, 8, 0.1, 0.02), (2, 1, 8, 0.2, 0.04))
    assert times(profile, 2, 1, 8) == pytest.approx((0.2, 0.04))


def test_computing_is_linear_in_the_samples_and_the_exchange_constant_beyond_those_measured():
    profile = _measured((2, 1, 8, 0.1, 0.02), (2, 1, 16, 0.18, 0.03))
    assert times(profile, 2, 1, 12) == pytest.approx((0.14, 0.025))
    assert times(profile, 2, 1, 32) == pytest.approx((0.34, 0.03))


def test_computing_is_as_with_the_closest_number_of_nodes_per_host():
    profile = _measured((1, 1, 8, 0.1, 0.0), (2, 2, 8, 0.12, 0.1), (4, 1, 8, 0.14, 0.02))
    assert times(profile, 8, 2, 8)[0] == pytest.approx(0.14)
    assert times(profile, 3, 3, 8)[0] == pytest.approx(0.12), "of equally many per host the closest number of nodes"


def test_an_exchange_is_as_on_the_closest_number_of_nodes():
    profile = _measured((2, 2, 8, 0.1, 0.3), (8, 2, 8, 0.1, 0.5), (4, 1, 8, 0.1, 0.02), (16, 4, 8, 0.1, 0.4))
    assert times(profile, 12, 3, 8)[1] == pytest.approx(0.4)
    assert times(profile, 64, 16, 8)[1] == pytest.approx(0.4)
    assert times(profile, 6, 2, 8)[1] == pytest.approx(0.5)
    assert times(profile, 3, 1, 8)[1] == pytest.approx(0.02), "within one host"


def test_what_was_not_measured_is_assumed_to_be_free():
    profile = _measured((1, 1, 8, 0.1, 0.0))
    assert times(profile, 4, 1, 64) == pytest.approx((0.1, 0.0))
    assert times(profile, 8, 2, 8) == pytest.approx((0.1, 0.0))


def test_between_hosts_at_least_what_it_takes_within_one():
    profile = _measured((1, 1, 8, 0.1, 0.0), (4, 1, 8, 0.1, 0.04))
    assert times(profile, 8, 2, 8)[1] == pytest.approx(0.04)


@example(3, 1 / 256, 0.5, 0.0, 11.0)  # 1 % below the batch that fills all passes
@given(st.integers(1, 16), st.floats(0.001, 0.1), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0.01, 100))
def test_best_plan_is_the_best_of_all_candidates(nodes, each, fixed, exchange, variance):
    """In a model known exactly, no batch has more than 3 % more goodput.

    One between two candidates, as Pollux' simulator has them, may fill all passes.
    """
    profile = _measured(
        (nodes, 1, 8, fixed + 8 * each, exchange * (nodes > 1)),
        (nodes, 1, 64, fixed + 64 * each, exchange * (nodes > 1)),
    )
    noise = GradientNoise(1.0, variance)
    plan, goodput = profile.best(LIMITS, nodes, 1, noise)

    def goodput_of(plan: BatchPlan) -> float:
        step, sync = profile.times(nodes, 1)(np.array([float(plan.local)]))[:, 0]
        worth = steps_worth(np.array([float(nodes * plan.local * plan.passes)]), 32, 1.0, variance)[0]
        return worth / (step + (plan.passes - 1) * (step - sync))

    assert goodput == pytest.approx(goodput_of(plan))
    candidates = zip(*LIMITS.candidates(nodes), strict=True)
    assert goodput == pytest.approx(max(goodput_of(BatchPlan(int(local), int(passes))) for local, passes in candidates))
    least = max(LIMITS.initial, nodes * LIMITS.least_local)
    assert goodput >= 0.97 * max(goodput_of(LIMITS.plan(batch, nodes)) for batch in range(least, 513, 16))


def test_new_measurements_change_the_best_plan():
    profile = _measured((1, 1, 8, 0.1, 0.0))
    optimistic = profile.best(LIMITS, 1, 1, NOISE)
    profile.observe(1, 1, 64, 10.0, 0.0)
    assert profile.best(LIMITS, 1, 1, NOISE)[1] < optimistic[1]


@pytest.mark.parametrize(("step", "exchange"), [(0.1, 0.1), (0.1, -0.1), (math.inf, 0.0)])
def test_impossible_measurements_are_refused(step, exchange):
    with pytest.raises(InvalidApp, match="not a measurement"):
        GoodputProfile().observe(1, 1, 8, step, exchange)


def test_limits_must_be_in_order():
    with pytest.raises(InvalidApp, match="batch limits"):
        BatchLimits(64, 32, 1, 8)
