"""Random numbers depend only on the position in a training job."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.training.data import random_streams as rng


def draw() -> list[float]:
    """Draw from all global generators; an odd number of normal variates leaves a cached one in the generator."""
    return [
        torch.randn(3).sum().item(),
        *np.random.standard_normal(3),  # noqa: NPY002 - the global generator is the one under test
        np.random.uniform(),  # noqa: NPY002 - the same
        random.random(),
        random.gauss(0, 1),
    ]


def test_equal_seeds_give_equal_numbers_and_others_different_ones() -> None:
    drawn = []
    for parts in ((1, 2), (1, 2), (2, 1)):
        rng.seed_all(*parts)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=2, max_size=2))
def test_different_parts_never_mix_to_one_seed_in_practice(parts: list[list[int]]) -> None:
    """Not even if they differ only in trailing zeros."""
    one, other = (rng.mix(*numbers) for numbers in parts)
    assert (one == other) == (parts[0] == parts[1])


def test_what_fetches_samples_draws_the_same_numbers() -> None:
    """Whether or not the GPU generators are seeded, too, which a forked process must not do."""
    rng.seed_all(1, 2)
    drawn = draw()
    rng.seed_cpu(1, 2)
    assert draw() == drawn


def test_seeds_fit_into_every_generator() -> None:
    assert 0 <= rng.mix(2**63, 2**64 - 1) < 2**63


@pytest.mark.parametrize("reads_layout", [True, False])
@pytest.mark.parametrize("between", ["nothing", "python", "numpy", "numpy, by another generator", "set by the user"])
def test_generators_go_on_where_they_were_after_others_have_drawn(
    reads_layout: bool, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not anything was drawn since they were seeded, and whether or not the layout of Python's is known."""
    monkeypatch.setattr(rng, "_layout_is_known", lambda: reads_layout)
    before = np.random.get_bit_generator()
    try:
        rng.seed_all(1, 2)
        if between == "python":
            random.gauss(0, 1)
        elif between == "numpy":
            np.random.standard_normal()  # noqa: NPY002 - the global generator is the one under test
        elif between == "numpy, by another generator":
            np.random.set_bit_generator(np.random.PCG64(5))
        elif between == "set by the user":
            random.setstate(random.Random(3).getstate())
        state = rng.host_draws()
        assert (state.seed is not None) is (between == "nothing")
        expected = [random.gauss(0, 1), np.random.standard_normal()]  # noqa: NPY002 - the same
        rng.seed_all(7)
        draw()
        rng.restore_host_draws(state)
        assert [random.gauss(0, 1), np.random.standard_normal()] == expected  # noqa: NPY002 - the same
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("reads_layout", [True, False])
def test_seeds_that_come_back_give_the_same_numbers(reads_layout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training jobs that take turns restore each other's seeds, with and without draws in between."""
    monkeypatch.setattr(rng, "_layout_is_known", lambda: reads_layout)
    expected = {}
    for seed in range(12):
        rng.seed_all(seed)
        expected[seed] = draw()
    for drawing in (False, True):
        states = {}
        for seed in range(12):
            rng.seed_all(seed)
            states[seed] = rng.host_draws()
        for seed in (3, 11, 3, 0, 11):
            rng.restore_host_draws(states[seed])
            if drawing:
                assert draw()[3:] == expected[seed][3:]
        rng.restore_host_draws(states[11])
        rng.seed_all(11)
        assert draw() == expected[11]


def test_the_layout_of_pythons_generator_is_the_expected_one_here() -> None:
    assert rng._layout_is_known()
