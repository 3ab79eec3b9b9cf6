"""Random numbers depend only on the position in a training."""

from __future__ import annotations

import random

import numpy as np
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
