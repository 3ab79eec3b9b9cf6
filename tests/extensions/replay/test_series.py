"""Sums over bins of time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.replay.accounts import Bins

times = st.floats(100.0, 130.0)


@given(st.lists(st.tuples(times, times, st.floats(-5, 5)), max_size=8), st.integers(1, 9))
def test_each_bin_holds_what_falls_into_it(pieces: list[tuple[float, float, float]], number: int) -> None:
    """Equal to the overlap of every piece with every bin."""
    bins = Bins(100.0, 130.0, number)
    edges = np.linspace(100.0, 130.0, number + 1)
    expected = np.zeros(number)
    for first, last, rate in pieces:
        start, end = min(first, last), max(first, last)
        bins.add_rate("x", start, end, rate)
        expected += rate * np.maximum(0.0, np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]))
    assert bins.sums("x") == pytest.approx(expected, abs=1e-9)


def test_an_amount_goes_to_the_bin_of_its_instant_and_the_last_instant_to_the_last_bin() -> None:
    bins = Bins(0.0, 10.0, 5)
    for time, amount in [(0.0, 1.0), (1.999, 2.0), (2.0, 4.0), (10.0, 8.0)]:
        bins.add("x", time, amount)
    assert bins.sums("x").tolist() == [3, 4, 0, 0, 8]


def test_names_are_apart_and_an_unknown_one_is_nothing() -> None:
    bins = Bins(0.0, 10.0, 2)
    bins.add_rate("x", 0.0, 10.0, 1.0)
    assert bins.sums("x").tolist() == [5, 5]
    assert bins.sums("y").tolist() == [0, 0]


def test_no_time_is_nothing() -> None:
    bins = Bins(0.0, 10.0, 2)
    bins.add_rate("x", 5.0, 5.0, 1e9)
    bins.add_rate("x", 6.0, 5.0, 1e9)
    assert bins.sums("x").tolist() == [0, 0]
