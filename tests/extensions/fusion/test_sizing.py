"""The size of an array, from the times of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing

if TYPE_CHECKING:
    from collections.abc import Callable


SHORT = 1e-3  # seconds; steps of which many are timed


def decide(
    limit: int, seconds: Callable[[int], float], *, alone: float = 1.0, shared: float = 0.0, **options: float
) -> ArraySizing:
    """Report steps until it has decided: `seconds` for a fused step by size, `alone` for each member one by one.

    A member needs 100 bytes, and all together `shared` bytes.
    """
    sizing = ArraySizing(limit, **options)
    for _ in range(1000):
        step = SHORT * (seconds(sizing.size) if sizing.fused else alone * sizing.size)
        if sizing.count(step, shared + 100.0 * sizing.size, shared if sizing.fused else 0.0):
            return sizing
    raise AssertionError("it never decides")


def test_an_array_grows_while_each_training_becomes_faster() -> None:
    sizing = decide(16, lambda _size: 1.5)
    assert (sizing.size, sizing.fused) == (16, True)
    assert sizing.gain == pytest.approx(16 / 1.5)


def test_it_stops_where_more_trainings_make_none_faster() -> None:
    sizing = decide(64, lambda size: 1.0 if size <= 8 else size / 8)
    assert (sizing.size, sizing.fused) == (8, True)


def test_trainings_that_gain_too_little_go_on_one_by_one() -> None:
    sizing = decide(16, lambda size: 0.95 * size)
    assert not sizing.fused
    assert sizing.gain == pytest.approx(1 / 0.95)


def test_one_slow_start_does_not_decide() -> None:
    """Larger sizes are tried although two are slower than one by one."""
    sizing = decide(16, lambda size: 2.4 if size == 2 else 0.5 * size)
    assert (sizing.size, sizing.fused) == (4, True)


def test_one_size_that_gains_nothing_does_not_stop_the_search() -> None:
    """Something else ran while four were timed."""
    sizing = decide(16, lambda size: {2: 2.0, 4: 4.0, 8: 4.0, 16: 6.0}[size])
    assert (sizing.size, sizing.fused) == (16, True)


def test_sizes_are_not_tried_without_end() -> None:
    """Two in a row are not faster than smaller ones."""
    tried: set[int] = set()
    decide(64, lambda size: tried.add(size) or 0.6 * size)  # type: ignore[func-returns-value]
    assert tried == {2, 4, 8}


@pytest.mark.parametrize(("alone", "fused"), [(1.0, True), (0.9, False)])
def test_a_gain_near_the_limit_is_measured_again(alone: float, fused: bool) -> None:
    """With all members, both ways: one of them was slower while the other one was timed."""
    sizing = ArraySizing(4)
    steps = 0
    while not sizing.decided:
        steps += sizing.size == 4
        one_by_one = alone if sizing.size == 4 else 1.0
        fused_step = 0.85 if sizing.size == 4 else 0.9
        sizing.count(SHORT * sizing.size * (fused_step if sizing.fused else one_by_one))
    assert steps == 5 * 18
    assert sizing.fused is fused


def test_slow_steps_among_fast_ones_do_not_count() -> None:
    sizing = ArraySizing(2)
    for step in range(1000):
        fast = step % 9 == 0
        if sizing.count(SHORT * ((0.5 if fast else 5.0) if sizing.fused else (1.0 if fast else 2.0))):
            break
    assert sizing.gain == 2.0


def test_a_machine_that_is_slow_for_a_while_does_not_decide() -> None:
    """Something else runs during the first steps that are fused; both ways are timed again."""
    sizing = ArraySizing(2)
    for step in range(1000):
        busy = 3.0 if step < 36 and sizing.fused else 1.0
        if sizing.count(SHORT * busy * (1.5 if sizing.fused else 2.0)):
            break
    assert sizing.fused
    assert sizing.gain == pytest.approx(2.0 / 1.5)


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 108), (0.05, 48), (0.5, 16), (5.0, 8)])
def test_fewer_steps_are_timed_where_they_are_long(seconds: float, steps: int) -> None:
    sizing = ArraySizing(2)
    count = 1
    while not sizing.count(seconds * (1.5 if sizing.fused else 2.0) / 2.0):
        count += 1
    assert (count, sizing.fused) == (steps, True)


def test_the_memory_is_asked_for_at_the_last_timed_step_of_each_size() -> None:
    sizing = ArraySizing(4)
    asked = []
    for step in range(1000):
        asked += [(step, sizing.size)] if sizing.completes_size(0.3) else []
        before = (sizing.size, sizing.fused)
        if sizing.count(0.3):
            break
        assert ((sizing.size, sizing.fused) != before) is (bool(asked) and asked[-1][0] == step)


def test_an_array_does_not_grow_beyond_the_memory() -> None:
    assert decide(16, lambda _size: 1.0, memory=1100.0).size == 8


def test_a_base_that_all_members_share_counts_once() -> None:
    """A device of 3000 bytes has room for 2400: for 14 members beside a base of 1000 bytes, not for three bases."""
    assert decide(8, lambda _size: 1.0, memory=3000.0, shared=1000.0).size == 8
    assert decide(16, lambda _size: 1.0, memory=3000.0, shared=1000.0).size == 8
    assert decide(16, lambda _size: 1.0, memory=3300.0, shared=1000.0).size == 16


@pytest.mark.parametrize(
    ("members", "base", "own", "turns"),
    [
        (8, 74e6, 2e6, True),
        (8, 74e6, 75e6, False),  # most is each one's own
        (8, 1e6, 1e3, False),  # less than the process itself
        (1, 74e6, 2e6, False),
    ],
)
def test_members_that_are_not_fused_stay_together_for_a_large_base(
    members: int, base: float, own: float, turns: bool
) -> None:
    sizing = decide(8, lambda size: 1.1 * size)
    assert sizing.takes_turns(members, base, own) is turns
    assert sizing.turns == ("fused they are 0.91 times as fast as one by one" if turns else "")
    assert not sizing.fused
    if turns:
        assert sizing.size == members


def test_members_that_are_fused_do_not_take_turns() -> None:
    sizing = decide(8, lambda size: 0.5 * size)
    assert not sizing.takes_turns(8, 74e6, 2e6)
    assert sizing.fused


def test_one_training_is_not_fused() -> None:
    sizing = ArraySizing(1)
    assert sizing.decided
    assert not sizing.fused


@given(
    st.integers(2, 64),
    st.lists(st.floats(0.01, 10.0), min_size=6, max_size=6),
)
def test_fusing_is_chosen_only_where_it_was_measured_to_be_faster(limit: int, factors: list[float]) -> None:
    sizing = decide(limit, lambda size: factors[size.bit_length() % 6] * size)
    assert 1 < sizing.size <= limit
    speed = 1 / factors[sizing.size.bit_length() % 6]
    assert sizing.gain == pytest.approx(speed)
    assert sizing.fused is (sizing.gain >= 1.1)


def test_missing_memory_decides_on_the_best_smaller_size() -> None:
    sizing = ArraySizing(16)
    while sizing.size < 8:
        sizing.count(1.0 if sizing.fused else sizing.size)
    sizing.halve(8)
    assert (sizing.size, sizing.fused, sizing.decided) == (4, True, True)
    assert not sizing.fuses(8), "those who are too many have not left"
    assert sizing.fuses(4)


def test_missing_memory_halves_a_size_that_was_known_and_ends_fusing_with_two() -> None:
    sizing = ArraySizing(16, 8)
    sizing.halve(8)
    assert (sizing.size, sizing.fused) == (4, True)
    sizing.halve(4)
    sizing.halve(2)
    assert (sizing.size, sizing.fused) == (1, False)
    assert sizing.verdict == "2 fused training jobs need more memory than there is"
    assert sizing.takes_turns(2, base=1e9, own=1.0)
