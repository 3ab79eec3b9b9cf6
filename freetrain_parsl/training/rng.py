"""Random numbers of a training: seeding, and the exact state of all generators as one tensor."""

from __future__ import annotations

import random

import numpy as np
import torch

_TORCH = torch.get_rng_state().numel()
_KEYS = 624  # words of a Mersenne twister, in numpy and in Python
_CUDA = 16  # seed and offset of a CUDA generator
_PARTS = (_TORCH, 4 * _KEYS, 3 * 8, 4 * (_KEYS + 1), 2 * 8, _CUDA)

STATE_BYTES = sum(_PARTS)
"""Length of a captured state."""


def mix(*parts: int) -> int:
    """Make one 63-bit seed of several non-negative numbers; equal for equal parts, unrelated for others."""
    # The count goes in first because a seed sequence does not tell trailing zeros apart.
    return int(np.random.SeedSequence((len(parts), *parts)).generate_state(1, np.uint64)[0]) >> 1


def seed_all(*parts: int) -> None:
    """Seed torch (CPU and GPU), numpy's and Python's global generators."""
    seed = mix(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one that user code draws from
    random.seed(seed)


def capture() -> torch.Tensor:
    """Return the state of all global generators, uint8 of length `STATE_BYTES`."""
    _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - see seed_all
    _, words, python_gauss = random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.zeros(_CUDA, dtype=torch.uint8)
    return torch.cat([
        torch.get_rng_state(),
        _bytes(np.asarray(keys, np.uint32)),
        _bytes(np.array([position, has_gauss, gauss], np.float64)),
        _bytes(np.asarray(words, np.uint32)),
        _bytes(np.array([python_gauss is not None, python_gauss or 0.0], np.float64)),
        cuda,
    ])  # fmt: skip


def restore(state: torch.Tensor) -> None:
    """Put the generators back to a captured state.

    Raises
    ------
    ValueError
        The state is not of this version of torch.
    """
    if state.numel() != STATE_BYTES or state.dtype != torch.uint8:
        raise ValueError(f"a state of the random generators has {STATE_BYTES} bytes, got {state.numel()}")
    torch_state, keys, numpy_rest, words, python_rest, cuda = torch.split(state, list(_PARTS))
    torch.set_rng_state(torch_state.clone())
    position, has_gauss, gauss = numpy_rest.numpy().view(np.float64)
    np.random.set_state(  # noqa: NPY002 - see seed_all
        ("MT19937", keys.numpy().view(np.uint32), int(position), int(has_gauss), float(gauss))
    )
    has_python_gauss, python_gauss = python_rest.numpy().view(np.float64)
    twister = tuple(int(word) for word in words.numpy().view(np.uint32))
    random.setstate((3, twister, float(python_gauss) if has_python_gauss else None))
    if torch.cuda.is_available() and bool(cuda.any()):
        torch.cuda.set_rng_state(cuda.clone())


def _bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
