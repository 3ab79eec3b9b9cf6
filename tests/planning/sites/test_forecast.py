"""The number of nodes expected until the next look."""

from __future__ import annotations

import numpy as np
import pytest

from freetrain_parsl.planning.sites.forecast import NodeForecast


def _after(numbers) -> NodeForecast:
    forecast = NodeForecast()
    for number in numbers:
        forecast.seen(float(number))
    return forecast


def test_nothing_is_expected_before_the_first_look():
    assert NodeForecast().mean_next() == 0.0


@pytest.mark.parametrize("number", [0.0, 7.0, 1e6])
def test_a_constant_number_is_expected_to_stay(number):
    assert _after([number]).mean_next() == number
    assert _after([number] * 50).mean_next() == pytest.approx(number)


def test_numbers_without_memory_return_to_their_mean():
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 100, size=400)
    forecast = _after([*numbers, 100])
    assert forecast.correlation < 0.15
    assert forecast.mean_next() == pytest.approx(numbers.mean() + 0.4 * (100 - numbers.mean()), rel=0.15)


def test_numbers_with_memory_are_expected_near_the_last_one():
    steps = np.repeat([10, 90, 10, 90, 10, 90], 60)
    forecast = _after(steps)
    assert forecast.correlation > 0.9
    assert 80 < forecast.mean_next() < 90


def test_the_correlation_is_that_of_the_textbook():
    """After many looks the prior no longer matters."""
    rng = np.random.default_rng(2)
    numbers = [50.0]
    for _ in range(5000):
        numbers.append(50 + 0.8 * (numbers[-1] - 50) + rng.normal())
    assert _after(numbers).correlation == pytest.approx(np.corrcoef(numbers[:-1], numbers[1:])[0, 1], abs=0.01)
    assert 0.75 < _after(numbers).correlation < 0.85
