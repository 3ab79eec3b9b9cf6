"""The physical model: division of batches, interpolation of step times, and the best batch."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.goodput.curve import BatchPlan
from freetrain_parsl.extensions.simulate.jobs.step_times import MeasuredStepTimes, Measurement, packed
from tests.extensions.simulate.small_profiles import NOISE, small_applications


@pytest.fixture
def net(tmp_path):
    return small_applications(tmp_path)["net"]


@pytest.mark.parametrize(
    ("batch", "gpus", "expected"),
    [
        (32, 1, (32, 1)),
        (64, 1, (32, 2)),  # more than the initial batch on one GPU: two passes
        (64, 2, (32, 1)),
        (512, 4, (64, 2)),  # 128 samples on each GPU do not fit
        (100, 3, (34, 1)),
        (512, 3, (56, 3)),  # rounded up to 57, but 3 x 3 x 57 is more than the largest batch
    ],
)
def test_batches_are_divided(net, batch, gpus, expected):
    assert net.limits.plan(batch, gpus) == BatchPlan(*expected)


def test_gradients_are_exchanged_in_the_last_pass_only(net):
    assert net.step_seconds((2, 2), BatchPlan(64, 2)) == pytest.approx(2 * 0.64 + 0.1)


def test_a_step_is_worth_what_the_noise_allows(net):
    assert net.worth(32, 0) == pytest.approx(1.0)
    assert net.worth(512, 0) == pytest.approx((NOISE + 1) / (NOISE / 16 + 1))


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_best_batch_is_the_fastest_of_all(net, gpus):
    placement = packed(gpus, 2)
    plan, speed = net.best(placement, 0)
    assert speed == pytest.approx(net.speed(placement, plan, 0))
    least = max(net.limits.initial, gpus * net.limits.least_local)
    rivals = [net.speed(placement, net.limits.plan(batch, gpus), 0) for batch in range(least, net.limits.largest + 1)]
    assert speed >= 0.99 * max(rivals)


def test_more_gpus_need_a_larger_batch(net):
    batches = [gpus * plan.local * plan.passes for gpus in (1, 4) for plan in [net.best(packed(gpus, 2), 0)[0]]]
    assert batches[0] < batches[1]


def test_an_application_whose_largest_batch_fits_on_one_gpu_stays_there(tmp_path):
    applications = small_applications(tmp_path)
    assert applications["table"].max_gpus == 1
    assert applications["net"].max_gpus == 64


def test_ring_order_does_not_depend_on_where_it_begins():
    rows = [Measurement(3, 7, (1, 2, 4), 8, 2.0, 1.0), Measurement(3, 7, (1, 4, 2), 8, 3.0, 1.0)]
    times = MeasuredStepTimes(rows)
    assert [times(p, 8)[0] for p in [(2, 4, 1), (4, 1, 2), (4, 2, 1)]] == [2.0, 2.0, 3.0]


def test_unmeasured_placements_are_interpolated_at_equal_gpus_per_node():
    rows = [
        Measurement(nodes, nodes * each, None, 8, float(10 * nodes + each), 1.0) for nodes in (2, 6) for each in (1, 3)
    ]
    times = MeasuredStepTimes(rows)
    assert times((3, 3, 3, 3), 8)[0] == pytest.approx(43.0)
    assert times((2, 2, 2, 2), 8)[0] == pytest.approx(42.0)
    assert times((3,) * 9, 8)[0] == pytest.approx(63.0)  # beyond the largest measured: constant


@pytest.mark.parametrize(("gpus", "expected"), [(1, (1,)), (4, (4,)), (6, (4, 2)), (12, (4, 4, 4))])
def test_packed_uses_the_fewest_nodes(gpus, expected):
    assert packed(gpus, 4) == expected
