"""Random numbers of a training job: every stream is seeded by the position in the training job, never saved.

Random numbers depend on the seed, the epoch, the position in it and the shard of the batch; so a repeated batch draws
the same numbers, and newcomers and restored training jobs need no generator state.
"""

from __future__ import annotations

import ctypes
import random
import sys
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MASK = (1 << 64) - 1
_WORDS = 624  # of a Mersenne Twister
_KEPT_SEEDS = 64  # at least one for each training job of an array


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


_mixed = lru_cache(maxsize=32)(mix)  # training jobs of an array come to one place after another


def seed_all(*parts: int) -> None:
    """Seed the global generators of torch (CPU and CUDA), numpy and Python.

    Not by ``torch.manual_seed``: for each kind of accelerator that is not in use it formats a stack trace, which takes
    longer than the step of a small model.
    """
    seed_exactly(_mixed(*parts))


def seed_exactly(seed: int) -> None:
    """Seed them as ``torch.manual_seed(seed)``, ``numpy.random.seed(seed)`` and ``random.seed(seed)`` do."""
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    _seeding.seed(seed)


def seed_cpu(*parts: int) -> None:
    """Seed all but the GPU generators, for code that fetches samples, possibly in a forked process."""
    seed = mix(*parts)
    torch.default_generator.manual_seed(seed)
    _seeding.seed(seed)


@contextmanager
def cpu_kept() -> Iterator[None]:
    """Restore the states of all but the GPU generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - user code draws from the global generator
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - the same


@contextmanager
def cpu_seeded(*parts: int) -> Iterator[None]:
    """Seed all but the GPU generators as `seed_cpu` does, and restore their states at the end."""
    with cpu_kept():
        seed_cpu(*parts)
        yield


class HostDraws(NamedTuple):
    """State of the generators of numpy and Python."""

    seed: int | None
    """They are as after seeding with this seed, without any draws since; ``None``: see the next."""
    python: Any = None
    """Their full states otherwise: hundreds of numbers, which take a tenth of a millisecond to read and set."""
    numpy: Any = None


class _Seeding:
    """The last seeding of both generators: whether numbers were drawn since, without reading whole states.

    It keeps the states of the last few seeds, as training jobs that take turns come back to them: copying takes a tenth
    of the time of seeding.
    """

    def __init__(self) -> None:
        self._draws = HostDraws(None)
        self._places: tuple[object, ...] = ()
        self._states: dict[int | None, tuple[bytes, bytes]] = {}  # seed -> words of numpy's and Python's generator

    def seed(self, seed: int) -> None:
        """Seed both generators."""
        untouched = self._is_untouched()
        if untouched and seed == self._draws.seed:
            return
        known = self._states.get(seed)
        if untouched and known is not None:  # untouched, so neither holds the second of a pair of normal variates
            for memory, words in zip(_memory(), known, strict=True):
                memory[:] = words
        else:
            np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from the global generator
            random.seed(seed)
        self._draws, self._places = HostDraws(seed), host_places()

    def draws(self) -> HostDraws | None:
        """Return the states of both generators as a seed; ``None`` if numbers were drawn since."""
        if not self._is_untouched():
            return None
        seed = self._draws.seed
        if seed not in self._states and _layout_is_known():
            self._states[seed] = tuple(map(bytes, _memory()))  # type: ignore[assignment]  # of two
            if len(self._states) > _KEPT_SEEDS:
                del self._states[next(iter(self._states))]
        return self._draws

    def _is_untouched(self) -> bool:
        return self._draws.seed is not None and host_places() == self._places


def host_draws() -> HostDraws:
    """Return the state of the generators of numpy and Python."""
    draws = _seeding.draws()
    if draws is not None:
        return draws
    return HostDraws(None, random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002 - the global one


def restore_host_draws(draws: HostDraws) -> None:
    """Set the state of the generators of numpy and Python."""
    if draws.seed is not None:
        _seeding.seed(draws.seed)
    else:
        random.setstate(draws.python)
        np.random.set_state(draws.numpy)  # noqa: NPY002 - the same


def host_places() -> tuple[object, ...]:
    """Return the places of both generators in their sequences, and two words of their states.

    A draw changes the place, another seed the words; the first one is the same for many seeds.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in numpy's stubs
    if type(generator) is not np.random.MT19937:  # set by the user
        return (object(),)
    # Both are Mersenne Twisters. numpy documents the address of its state: the words, then the place.
    words = _words_at(generator.ctypes.state_address)
    return id(generator), words[_WORDS], words[1], words[_WORDS - 1], *_python_place()


@lru_cache(maxsize=4)
def _words_at(address: int) -> Any:
    return (ctypes.c_uint32 * (_WORDS + 1)).from_address(address)


def _read_python_place() -> tuple[int, ...]:
    words = _words_at(_address_of_python())
    return words[0], words[2], words[_WORDS]


def _address_of_python() -> int:
    """Return where ``int index; uint32_t state[624]`` begin, which follow on PyObject in CPython's generator."""
    return id(random._inst) + object.__basicsize__  # noqa: SLF001


def _memory() -> tuple[memoryview, memoryview]:
    """Return the memory of the states of numpy's and Python's generator; both are Mersenne Twisters."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in numpy's stubs
    return _bytes_at(generator.ctypes.state_address), _bytes_at(_address_of_python())


@lru_cache(maxsize=4)
def _bytes_at(address: int) -> memoryview:
    return memoryview(_words_at(address)).cast("B")


def _ask_python_place() -> tuple[int, ...]:
    state = random.getstate()[1]
    return state[-1], state[1], state[_WORDS - 1]


def _python_place() -> tuple[int, ...]:
    return (_read_python_place if _layout_is_known() else _ask_python_place)()


@cache
def _layout_is_known() -> bool:
    """Check that this Python stores its generator in the expected layout; otherwise its state is asked for."""
    if sys.implementation.name != "cpython":
        return False
    before = random.getstate()
    try:
        for seed in (1, 2):
            random.seed(seed)
            for _ in range(3):
                if _read_python_place() != _ask_python_place():
                    return False
                random.random()
        return True
    finally:
        random.setstate(before)


_seeding = _Seeding()


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
