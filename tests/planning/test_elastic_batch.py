"""The best batch for each number of nodes, from measured steps and gradient noise."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.curves.elastic_batch import (
    BatchRange,
    ElasticProfile,
    NoiseEstimate,
    StepDurations,
    _non_negative_least_squares,
)

LIMITS = BatchRange(32, 16, 1024)


def duration(nodes: int, batch: float, fixed: float = 0.01, each: float = 1e-4, exchange: float = 0.02) -> float:
    return fixed + each * batch / nodes + (exchange if nodes > 1 else 0.0)


def trained(profile: ElasticProfile, nodes: int, batch: int, steps: int = 100, **cost: float) -> ElasticProfile:
    profile.times.observe(nodes, batch, steps, steps * batch, steps * duration(nodes, batch, **cost))
    return profile


def profile(noise_scale: float = 1000.0) -> ElasticProfile:
    one = ElasticProfile(LIMITS)
    one.noise = NoiseEstimate(1.0, noise_scale)
    return one


def test_candidates_are_geometric_from_the_initial_batch_and_end_at_the_limits() -> None:
    assert BatchRange(32, 10, 100).candidates() == [10, 11, 16, 23, 32, 45, 64, 91, 100]
    assert BatchRange(8, 8, 8).candidates() == [8]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 5000))
def test_candidates_are_in_the_range_and_contain_the_initial_batch(least: int, more: int, most: int) -> None:
    limits = BatchRange(least + more, least, least + more + most)
    sizes = limits.candidates()
    assert limits.initial in sizes
    assert all(limits.least <= size <= limits.most for size in sizes)


@pytest.mark.parametrize("limits", [(8, 9, 16), (32, 8, 16), (8, 0, 16)])
def test_a_range_without_the_initial_batch_is_refused(limits: Any) -> None:
    with pytest.raises(PlanningError):
        BatchRange(*limits)


def test_the_efficiency_falls_from_one_to_that_of_steps_alone() -> None:
    """At the initial batch 1; without noise a larger batch is worth no more than a smaller one."""
    for noise, batch, efficiency in ((1000.0, 32, 1.0), (0.0, 64, 0.5), (math.inf, 64, 1.0), (96.0, 160, 0.5)):
        estimate = NoiseEstimate(0.0, 1.0) if noise == math.inf else NoiseEstimate(2.0, 2.0 * noise)
        assert estimate.efficiency(batch, 32) == pytest.approx(efficiency)
    assert NoiseEstimate(0.0, 0.0).efficiency(64, 32) == 1.0


@pytest.mark.parametrize("wrong", [(-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_an_estimate_is_finite_and_not_negative(wrong: tuple[float, float]) -> None:
    with pytest.raises(PlanningError):
        NoiseEstimate(*wrong)


def test_measured_steps_have_the_measured_duration_and_others_the_fitted_one() -> None:
    times = StepDurations()
    for nodes, batch in ((1, 32), (1, 64), (2, 64), (4, 256)):
        times.observe(nodes, batch, 50, 50 * batch, 50 * duration(nodes, batch))
    for nodes, batch in ((1, 32), (2, 64), (1, 512), (2, 128), (4, 64)):
        assert times.seconds(nodes, batch) == pytest.approx(duration(nodes, batch), rel=1e-6)


def test_with_one_size_measured_larger_batches_are_tried() -> None:
    times = StepDurations()
    times.observe(1, 32, 50, 1600, 5.0)
    assert times.seconds(1, 64) == pytest.approx(0.1)
    assert not times.known


def test_a_step_on_one_node_takes_time_although_exchanges_explain_all_that_was_measured() -> None:
    """Twice the nodes, and more than twice the time: nothing is left for the work of a node."""
    one = profile()
    for nodes, seconds in ((2, 0.010), (4, 0.024)):
        one.times.observe(nodes, 64, 50, 3200, 50 * seconds)
    curve = one.curve(4)
    assert curve is not None
    assert all(0 < curve(nodes) < math.inf for nodes in (1, 2, 3, 4))
    assert one.times.seconds(4, 64) == pytest.approx(0.024)


def test_recent_steps_replace_old_ones() -> None:
    """The machine has become twice as fast."""
    times = StepDurations()
    for seconds in (0.2, 0.1):
        for _ in range(40):
            times.observe(1, 32, 50, 1600, 50 * seconds)
    assert times.seconds(1, 32) == pytest.approx(0.1, rel=0.01)


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_the_fit_is_optimal(seed: int) -> None:
    """By its conditions of optimality: no positive coefficient can change, no zero one can grow, for a better fit."""
    random = np.random.default_rng(seed)
    rows = np.abs(random.normal(size=(6, 4)))
    target = rows @ random.normal(size=4) + 0.1 * random.normal(size=6)
    found = _non_negative_least_squares(rows, target)
    gradient = rows.T @ (rows @ found - target)
    assert (found >= 0).all()
    assert np.allclose(gradient[found > 0], 0, atol=1e-4)
    assert (gradient[found == 0] > -1e-4).all()


@pytest.mark.parametrize("noise_scale", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_batch_settles_at_the_best_one_in_small_changes(nodes: int, noise_scale: float) -> None:
    """From measured steps alone: within 10 % of the best goodput, each change by a factor of two at most."""
    one, batch, sizes = profile(noise_scale), 32, [32]
    for _ in range(20):
        trained(one, nodes, batch)
        batch = one.next_batch(nodes, batch)
        sizes.append(batch)
    assert all(0.5 <= after / before <= 2 for before, after in pairwise(sizes))
    assert len(set(sizes[-5:])) == 1

    def goodput(size: int) -> float:
        return size / duration(nodes, size) * NoiseEstimate(1.0, noise_scale).efficiency(size, 32)

    assert goodput(batch) >= 0.9 * max(map(goodput, LIMITS.candidates()))


def test_a_larger_noise_scale_and_more_nodes_ask_for_larger_batches() -> None:
    def settled(nodes: int, noise_scale: float) -> int:
        one = profile(noise_scale)
        for size in LIMITS.candidates():
            trained(one, nodes, size)
        return one.best(nodes)[0]

    assert settled(1, 30.0) < settled(1, 3000.0)
    assert settled(1, 300.0) < settled(4, 300.0)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(20, 5000))
def test_batches_do_not_alternate_on_a_noisy_machine(seed: int, noise_scale: float) -> None:
    """Steps vary by 3 %: in a hundred reports after the search the batch changes rarely."""
    random = np.random.default_rng(seed)
    one, batch, changes = profile(noise_scale), 32, 0
    for report in range(130):
        steps = 20
        seconds = steps * duration(1, batch) * (1 + 0.03 * random.uniform(-1, 1))
        one.times.observe(1, batch, steps, steps * batch, seconds)
        size = one.next_batch(1, batch)
        changes += report >= 30 and size != batch
        batch = size
    assert changes <= 3


def test_nothing_changes_without_an_estimate_of_the_noise_or_enough_steps() -> None:
    unknown = ElasticProfile(LIMITS)
    assert trained(unknown, 1, 32).next_batch(1, 32) == 32
    assert trained(profile(), 1, 32, steps=9).next_batch(1, 32) == 32
    assert trained(profile(), 1, 32, steps=10).next_batch(1, 32) == 64


def test_a_batch_does_not_grow_while_the_gradient_is_lost_in_its_noise() -> None:
    """Every batch size then seems equally efficient, also after a training job has diverged."""
    lost = trained(profile(), 1, 64)
    lost.noise = NoiseEstimate(0.0, 1000.0)
    assert lost.next_batch(1, 64) == 64
    lost.noise = NoiseEstimate(1.0, 1000.0)
    assert lost.next_batch(1, 64) > 64


def test_a_short_measurement_does_not_lead_back_to_an_earlier_size() -> None:
    """For 2 s steps of 64 samples take ten times as long, as another process has the processor."""
    one = trained(profile(), 1, 32)
    one.times.observe(1, 64, 13, 13 * 64, 2.0)
    assert one.next_batch(1, 64) == 64
    one.times.observe(1, 64, 13, 13 * 64, 2.0)
    assert one.next_batch(1, 64) < 64


def test_the_curve_is_the_best_goodput_for_each_number_of_nodes() -> None:
    one = trained(trained(profile(), 1, 32), 1, 64)
    trained(one, 2, 128)
    curve = one.curve(6)
    assert curve is not None
    assert [nodes for nodes, _ in curve.points] == [1, 2, 3, 4, 5, 6]
    for nodes in (1, 2, 6):
        expected = max(
            size / duration(nodes, size) * NoiseEstimate(1.0, 1000.0).efficiency(size, 32)
            for size in LIMITS.candidates()
        )
        assert curve(nodes) == pytest.approx(expected, rel=1e-6)


def test_there_is_no_curve_until_two_sizes_have_been_measured() -> None:
    assert trained(profile(), 1, 32).curve(4) is None
    assert trained(trained(ElasticProfile(LIMITS), 1, 32), 1, 64).curve(4) is None


@pytest.mark.parametrize("wrong", [(0, 8, 1, 8, 1.0), (1, 8, 0, 8, 1.0), (1, 8, 1, 8, 0.0), (1, 8, 1, 8, math.nan)])
def test_what_is_no_measurement_is_refused(wrong: Any) -> None:
    with pytest.raises(PlanningError):
        StepDurations().observe(*wrong)
