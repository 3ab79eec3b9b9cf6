"""The ranking of configurations: pure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.sweeps.ranking import is_usable, promoted, ranked

VALUES = st.lists(st.none() | st.floats(), min_size=1, max_size=40)
MODES = st.sampled_from(["min", "max"])


@given(VALUES, MODES, st.integers(2, 5))
def test_those_that_go_on_are_the_best(values, mode, eta) -> None:
    chosen = promoted(values, mode, eta)
    usable = [position for position, value in enumerate(values) if is_usable(value)]
    assert len(chosen) == min(len(usable), max(1, len(values) // eta)) == len(set(chosen))
    assert set(chosen) <= set(usable)
    sign = 1 if mode == "min" else -1
    others = [sign * values[position] for position in usable if position not in chosen]
    assert all(sign * values[position] <= other for position in chosen for other in others)


@given(VALUES, MODES)
def test_a_ranking_has_every_position_once_with_failures_last(values, mode) -> None:
    order = ranked(values, mode)
    assert sorted(order) == list(range(len(values)))
    usable = [is_usable(values[position]) for position in order]
    assert usable == sorted(usable, reverse=True)


@pytest.mark.parametrize(
    ("values", "mode", "order"),
    [
        ([3.0, 1.0, 2.0], "min", [1, 2, 0]),
        ([3.0, 1.0, 2.0], "max", [0, 2, 1]),
        ([1.0, 0.0, 1.0, 0.0], "min", [1, 3, 0, 2]),
        ([1.0, 0.0, 1.0, 0.0], "max", [0, 2, 1, 3]),
        ([math.nan, None, 5.0, math.inf], "min", [2, 3, 0, 1]),
        ([math.nan, None, 5.0, math.inf], "max", [3, 2, 0, 1]),
    ],
)
def test_equal_values_keep_their_order_and_failures_are_last(values, mode, order) -> None:
    assert ranked(values, mode) == order


def test_a_third_goes_on_rounded_down_but_at_least_one() -> None:
    assert [len(promoted([1.0] * number, "min", 3)) for number in range(1, 10)] == [1, 1, 1, 1, 1, 2, 2, 2, 3]
    assert promoted([None, math.nan], "min", 3) == []
