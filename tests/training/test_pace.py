"""The pace of a fragment."""

from __future__ import annotations

import pytest

from freetrain_parsl.training.progress import Pace


def test_the_first_step_counts_for_closing_but_not_for_the_rate() -> None:
    """It may be long (lazy initialization), and it may be the only one before the node closes."""
    pace = Pace()
    pace.add(10, 4.0)
    assert pace.rate is None
    assert pace.longest_step == 4.0
    pace.add(10, 0.5)
    assert pace.rate == pytest.approx(20)


def test_the_rate_follows_a_change_within_seconds() -> None:
    pace = Pace()
    for _ in range(100):
        pace.add(10, 0.1)
    for _ in range(100):
        pace.add(10, 0.2)
    assert pace.rate == pytest.approx(50, rel=0.05)


def test_one_long_step_is_forgotten() -> None:
    pace = Pace()
    pace.add(1, 10.0)
    for _ in range(100):
        pace.add(1, 0.1)
    assert pace.longest_step < 0.2


def test_a_restart_forgets_the_throughput_and_remembers_the_longest_step() -> None:
    """In another group the next step may be as long."""
    pace = Pace()
    for _ in range(3):
        pace.add(10, 2.0)
    pace.restart()
    assert pace.rate is None
    assert pace.longest_step == 2.0
