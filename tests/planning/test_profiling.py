"""Online curves: measurements are used, other sizes are tried while it pays off, and results are near the optimum."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.curves.learning import Profile, learned
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.policies import MilpPolicy


def measured(*rates, prior=None):
    profile = Profile(prior)
    for nodes, rate in rates:
        profile.observe(nodes, rate * 60.0, 60.0)
    return profile


def test_nothing_known_is_the_default_on_the_smallest_size():
    profile = Profile()
    assert profile.curve == ScalingCurve.default()
    assert profile.largest_worth_trying is None
    (trainer,) = learned([PlannedJob("t", 2, 64, ScalingCurve.default())], {"t": profile})
    assert (trainer.min_nodes, trainer.max_nodes) == (2, 2)


def test_a_trainer_that_has_done_nothing_yet_is_still_unknown():
    profile = measured((1, 0.0))
    assert not profile.known
    assert profile.curve.relative
    (trainer,) = learned([PlannedJob("t", 1, 64, ScalingCurve.default())], {"t": profile})
    assert trainer.rate(1) > 0


def test_measurements_of_a_size_are_averaged_by_their_length():
    profile = Profile()
    profile.observe(4, 400.0, 1.0)
    profile.observe(4, 300.0, 3.0)
    assert profile.curve(4) == 175.0


@given(st.dictionaries(st.integers(1, 64), st.floats(0, 1e6), min_size=1).filter(lambda rates: any(rates.values())))
def test_the_curve_passes_through_what_was_measured(rates):
    curve = measured(*rates.items()).curve
    assert [curve(n) for n in rates] == pytest.approx(list(rates.values()))
    assert not curve.relative


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 1e6), min_size=1), st.integers(1, 4), st.integers(0, 200))
def test_nothing_is_tried_beyond_twice_the_largest_or_four_times_the_best(rates, low, more):
    trainer = PlannedJob("t", low, low + more, ScalingCurve.default())
    (seen,) = learned([trainer], {"t": measured(*rates.items())})
    best = min(n for n, rate in rates.items() if rate == max(rates.values()))
    assert seen.max_nodes <= max(low, min(2 * max(rates), 4 * best))
    assert trainer.min_nodes == seen.min_nodes <= seen.max_nodes <= trainer.max_nodes
    # Optimism is bounded: no size is expected to exceed a linear gain from the best.
    assert seen.curve(seen.max_nodes) <= max(rates.values()) * max(1.0, seen.max_nodes / best) * (1 + 1e-9)


def test_the_next_size_is_expected_to_be_as_efficient_as_the_best():
    assert measured((1, 100.0)).curve(2) == 200.0
    assert measured((1, 100.0), (4, 240.0)).curve(8) == 480.0
    assert measured((1, 100.0), (2, 190.0), (4, 180.0)).curve(8) == 760.0


def test_one_doubling_without_gain_is_forgiven_two_end_the_climb():
    assert measured((1, 100.0), (2, 190.0), (4, 180.0)).largest_worth_trying == 8
    assert measured((1, 100.0), (2, 190.0), (4, 180.0), (8, 185.0)).largest_worth_trying == 8


def test_below_what_was_measured_rates_are_in_proportion():
    assert measured((8, 400.0)).curve(2) == 100.0


def test_a_users_curve_keeps_its_shape_and_does_not_limit():
    prior = ScalingCurve({1: 100.0, 4: 400.0, 16: 800.0})
    profile = measured((4, 200.0), prior=prior)
    assert profile.largest_worth_trying is None
    assert [profile.curve(n) for n in (1, 4, 16)] == [50.0, 200.0, 400.0]
    assert Profile(prior).curve == prior
    # Where the prior is zero, there is no shape to keep.
    assert measured((1, 5.0), prior=ScalingCurve({1: 0.0, 2: 10.0})).curve(1) == 5.0


def test_who_is_unknown_does_not_wait_behind_those_that_are_known():
    trainers = [PlannedJob("known", 1, 8, ScalingCurve.default()), PlannedJob("new", 2, 8, ScalingCurve.default())]
    seen = learned(trainers, {"known": measured((1, 3000.0), (2, 5000.0)), "new": Profile()})
    assert seen[1].rate(2) == 6000.0
    pool = Pool([PoolNode("a"), PoolNode("b"), PoolNode("c")])
    assert "new" in MilpPolicy("throughput").allocate(pool, seen, {}, 0.0).allocation


def test_trainers_that_are_alike_share_what_is_measured():
    trainers = [PlannedJob(name, 1, 8, ScalingCurve.default()) for name in ("a", "b")]
    shared = measured((1, 100.0), (2, 150.0))
    first, second = learned(trainers, {"a": shared, "b": shared})
    assert first.curve == second.curve == shared.curve
    assert second.max_nodes == 4


def test_without_a_profile_a_trainer_is_left_alone():
    trainer = PlannedJob("t", 1, 8, ScalingCurve({1: 1.0}))
    assert learned([trainer], {}) == [trainer]


@pytest.mark.parametrize(
    ("nodes", "samples", "seconds"), [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, math.nan, 1.0), (1, 1.0, 0.0), (1, 1.0, -1.0)]
)
def test_what_is_no_measurement_is_refused(nodes, samples, seconds):
    with pytest.raises(PlanningError, match="not a measurement"):
        Profile().observe(nodes, samples, seconds)


def hidden_trainers(rng, *, step):
    """Make trainers by Amdahl's law; with `step` each loses up to half of its rate beyond 8 nodes."""
    trainers = []
    for index in range(5):
        serial, one = 10 ** rng.uniform(-3, -1), rng.uniform(100, 3000)
        cut = rng.uniform(0.5, 0.8) if step else 1.0
        rates = {n: one / (serial + (1 - serial) / n) * (cut if n > 8 else 1.0) for n in range(1, 65)}
        trainers.append(
            PlannedJob(f"t{index}", int(rng.integers(1, 3)), 64, ScalingCurve(rates), CostsInSeconds(18, 12))
        )
    return trainers


def work_done(trainers, pools, rng=None, noise=0.0):
    """Simulate a random pool with true curves or (with `rng`) learned ones; return speed-up seconds by decision."""
    policy = MilpPolicy("speedup", horizon=timedelta(seconds=120))
    profiles = {t.name: Profile() for t in trainers}
    current, done = {}, []
    for nodes, seconds in pools:
        pool = Pool(PoolNode(f"n{i:03}") for i in range(nodes))
        seen = trainers if rng is None else learned(trainers, profiles)
        allocation = policy.allocate(pool, seen, current, 0.0).allocation
        gained = 0.0
        for t in trainers:
            before, kept = current.get(t.name, frozenset()), len(current.get(t.name, frozenset()) & pool.keys())
            count = len(allocation.get(t.name, ()))
            lost = t.costs.down * t.rate(len(before)) if kept < len(before) else 0.0
            if kept and count != kept:
                lost += (t.costs.up if count > kept else t.costs.down) * t.rate(max(kept, t.min_nodes))
            gained += (t.rate(count) * seconds - lost) / t.rate(t.min_nodes)
            if rng is not None and count:
                profiles[t.name].observe(count, t.rate(count) * seconds * rng.uniform(1 - noise, 1 + noise), seconds)
        current = allocation
        done.append(gained)
    return np.array(done)


@pytest.mark.slow
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", [1, 2])
def test_learned_curves_come_close_to_known_ones(seed, noise, step):
    """Without a prior: within 3 % over 200 decisions (five hours), and within 1.5 % after the first 80."""
    rng = np.random.default_rng(seed)
    trainers = hidden_trainers(rng, step=step)
    sizes = np.clip(40 + np.cumsum(rng.integers(-6, 7, size=200)), 5, 80)
    pools = list(zip(sizes.tolist(), (1 + rng.exponential(90, size=200)).tolist(), strict=True))
    known, found = work_done(trainers, pools), work_done(trainers, pools, rng, noise)
    assert found.sum() >= 0.97 * known.sum()
    assert found[80:].sum() >= 0.985 * known[80:].sum()
