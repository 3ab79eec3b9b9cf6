"""The positions of an epoch that is too long to be in memory, such as ten billion samples drawn with replacement.

They are drawn in chunks, when they are needed. A chunk of the session's own order is seeded by its number, so that a
training job resumes at any position at once; torch's order is one sequence, which is drawn again from its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.utils.data import RandomSampler

from freetrain_parsl.training.data.random_streams import mix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LazyPositions", "Positions", "counts", "in_torchs_order", "is_long", "seeded_by_chunk"]

_LONG = 1 << 22  # positions, which take a few hundred megabytes as a list of integers
_CHUNK = 4096  # positions drawn together, with replacement
_DRAWN_TOGETHER = 32  # by torch's RandomSampler, with replacement


class LazyPositions:
    """A sequence of positions, of which the chunk in use is in memory.

    `draw` returns the positions of the chunk with a number, int64, shape (chunk,).
    """

    def __init__(self, length: int, chunk: int, draw: Callable[[int], torch.Tensor]) -> None:
        self._length = length
        self._size = chunk
        self._draw = draw
        self._drawn: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> torch.Tensor:
        begin, end, _ = part.indices(self._length)
        if end <= begin:
            return torch.empty(0, dtype=torch.int64)
        parts = []
        for number in range(begin // self._size, (end - 1) // self._size + 1):
            before = number * self._size
            parts.append(self._chunk(number)[max(begin - before, 0) : end - before])
        return torch.cat(parts)

    def first(self, length: int) -> LazyPositions:
        """Return the first positions."""
        return LazyPositions(min(length, self._length), self._size, self._draw)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield all positions."""
        for begin in range(0, self._length, self._size):
            yield self[begin : begin + self._size]

    def _chunk(self, number: int) -> torch.Tensor:
        if self._drawn[0] != number:
            self._drawn = number, self._draw(number)
        return self._drawn[1]


Positions: TypeAlias = torch.Tensor | LazyPositions
"""Positions in a dataset: of a tensor int64, shape (samples,)."""


def counts(positions: Positions, length: int) -> torch.Tensor:
    """Return how often each of `length` samples is among the positions, int64, shape (length,)."""
    if isinstance(positions, torch.Tensor):
        return torch.bincount(positions, minlength=length)
    total = torch.zeros(length, dtype=torch.int64)
    for chunk in positions.chunks():
        total += torch.bincount(chunk, minlength=length)
    return total


def is_long(sampler: object) -> bool:
    """Return whether a sampler yields too many positions for a list, and they can be drawn in chunks."""
    return type(sampler) is RandomSampler and len(sampler) > _LONG


def seeded_by_chunk(sampler: RandomSampler, seed: int, epoch: int) -> LazyPositions:
    """Return the positions of an epoch in the session's order, drawn as the sampler says."""
    samples = len(sampler.data_source)

    def draw(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix(seed, epoch, number))
        if sampler.replacement:
            return torch.randint(samples, (_CHUNK,), generator=generator)
        return torch.randperm(samples, generator=generator)

    return LazyPositions(len(sampler), _CHUNK if sampler.replacement else samples, draw)


def in_torchs_order(sampler: RandomSampler) -> LazyPositions:
    """Return the positions that a sampler without a generator of its own would yield now, see ``RandomSampler``."""
    samples, length = len(sampler.data_source), len(sampler)
    chunk = _DRAWN_TOGETHER if sampler.replacement else samples
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    generator, begun = torch.Generator().manual_seed(seed), 0

    def draw(number: int) -> torch.Tensor:
        nonlocal begun
        if number < begun:
            generator.manual_seed(seed)
            begun = 0
        for each in range(begun, number + 1):
            if sampler.replacement:
                size = min(chunk, length - each * chunk)
                drawn = torch.randint(high=samples, size=(size,), dtype=torch.int64, generator=generator)
            else:
                drawn = torch.randperm(samples, generator=generator)
        begun = number + 1
        return drawn

    return LazyPositions(length, chunk, draw)
