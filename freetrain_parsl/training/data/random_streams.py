"""Random numbers of a training: every stream is seeded by the position in the training, never saved.

Random numbers depend on the seed, the epoch, the position in it and the shard of the batch; so a repeated batch draws
the same numbers, and newcomers and restored trainings need no generator state.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a 63-bit seed from several non-negative numbers; equal for equal parts, unrelated for others.

    Uses the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), once for each part: it runs for every sample and
    takes a microsecond; numpy's seed sequence takes ten.
    """
    state = len(parts)
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(*parts: int) -> None:
    """Seed the global generators of torch (CPU and CUDA), numpy and Python.

    Not by ``torch.manual_seed``: for each kind of accelerator that is not in use it formats a stack trace, which takes
    longer than the step of a small model.
    """
    seed = mix(*parts)
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    _seed_others(seed)


def seed_cpu(*parts: int) -> None:
    """Seed all but the GPU generators, for code that fetches samples, possibly in a forked process."""
    seed = mix(*parts)
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


@contextmanager
def cpu_seeded(*parts: int) -> Iterator[None]:
    """Seed all but the GPU generators as `seed_cpu` does, and restore their states at the end."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - user code draws from the global generator
    with torch.random.fork_rng(devices=[]):
        seed_cpu(*parts)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - the same


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _seed_others(seed: int) -> None:
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from the global generator
    random.seed(seed)
