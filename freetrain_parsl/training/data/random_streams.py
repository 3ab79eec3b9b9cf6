"""Random numbers of a training: every stream is seeded by where the training is, never carried along.

What is drawn depends on the seed, the epoch, the position in it and the share of the batch; so a batch that is done
again draws the same numbers, and a newcomer or a restored training needs no generator's state.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Make one 63-bit seed of several non-negative numbers; equal for equal parts, unrelated for others.

    The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), once for each part: it runs for every sample, and
    takes a microsecond where numpy's seed sequence takes ten.
    """
    state = len(parts)
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(*parts: int) -> None:
    """Seed torch (CPU and GPU), numpy's and Python's global generators."""
    seed = mix(*parts)
    torch.manual_seed(seed)
    _seed_others(seed)


def seed_cpu(*parts: int) -> None:
    """Seed all but the GPU's generators, for what fetches samples; it may run in a forked process."""
    seed = mix(*parts)
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one that user code draws from
    random.seed(seed)
