"""The checkpoint interval minimizes the lost time, within bounds."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest

from freetrain_parsl.training.checkpoints.save_schedule import LONGEST, SHORTEST, best_work_between, checkpoint_interval


def expected_seconds(work: float, cost: float, mean_time: float) -> float:
    """Return the seconds per second of work with exponential failures: Daly's exact model, restart time zero."""
    return mean_time * math.expm1((work + cost) / mean_time) / work


def simulated_seconds(work: float, cost: float, mean_time: float, total: float = 2e5) -> float:
    """Return the same, from a simulation."""
    generator = np.random.default_rng(1)
    clock = done = 0.0
    while done < total:
        loss = generator.exponential(mean_time)
        segments = math.floor(loss / (work + cost))  # each is work followed by a checkpoint
        clock += loss
        done += segments * work
    return clock / done


@pytest.mark.parametrize("cost", [0.01, 0.2, 5.0, 60.0])
@pytest.mark.parametrize("mean_time", [300.0, 3600.0, 86400.0])
def test_no_other_interval_is_better_by_a_thousandth(cost: float, mean_time: float) -> None:
    ours = expected_seconds(best_work_between(cost, mean_time), cost, mean_time)
    best = min(expected_seconds(work, cost, mean_time) for work in np.geomspace(cost / 10, mean_time * 3, 4000))
    assert ours <= best * 1.001


def test_the_simulated_optimum_is_there_too() -> None:
    """Half and twice the interval lose more time, in a simulation without the formula."""
    cost, mean_time = 5.0, 600.0
    work = best_work_between(cost, mean_time)
    lost = {factor: simulated_seconds(work * factor, cost, mean_time) - 1 for factor in (0.4, 1.0, 2.5)}
    assert lost[1.0] < 0.93 * min(lost[0.4], lost[2.5])


def test_where_a_checkpoint_costs_little_it_is_youngs_rule() -> None:
    assert best_work_between(0.001, 3600) == pytest.approx(math.sqrt(2 * 0.001 * 3600), rel=1e-2)


def test_where_a_checkpoint_costs_more_than_a_loss_work_goes_on_as_long_as_one_may_expect() -> None:
    assert best_work_between(100, 50) == 50


@pytest.mark.parametrize(
    ("cost", "write", "hours", "seconds"),
    [
        (0.0001, 0.1, 1.0, SHORTEST.total_seconds()),
        (60.0, 60.0, 1000.0, LONGEST.total_seconds()),
        (0.0001, 40.0, 1.0, 80.0),
        (1.0, 3000.0, 1.0, 6000.0),
    ],
)
def test_bounds(cost: float, write: float, hours: float, seconds: float) -> None:
    """At least five seconds, at most half an hour, and never so short that writes would overlap."""
    assert checkpoint_interval(cost, write, timedelta(hours=hours)) == timedelta(seconds=seconds)
