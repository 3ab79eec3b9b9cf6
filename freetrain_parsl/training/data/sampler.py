"""A user's sampler: the positions of an epoch, the same in every process."""

from __future__ import annotations

from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils.data import DistributedSampler
from torch.utils.data.sampler import BatchSampler

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.random_streams import cpu_seeded, mix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

__all__ = ["EpochOrder", "IndexSampler", "check_sampler", "draw"]


class IndexSampler(Protocol):
    """What ``session.loader`` needs of a sampler: a length, and positions in the dataset."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class EpochOrder:
    """The positions of each epoch as a function gives them; an `IndexSampler`.

    Parameters
    ----------
    order
        Epoch -> positions in the dataset.
    seed
        The training's seed.

    Raises
    ------
    UsageError
        `order` is not a function of the epoch, or yields nothing with a length.
    """

    def __init__(self, order: Callable[[int], Sequence[int]], seed: int) -> None:
        if not callable(order):
            raise UsageError(f"session.loader: order is a function: epoch -> positions; got {type(order).__name__}")
        self._order = order
        self._epoch = 0
        with cpu_seeded(seed, 0):
            first = order(0)
        if not hasattr(first, "__len__"):
            raise UsageError(f"session.loader: order must return a sequence of positions, got {type(first).__name__}")
        self._length = len(first)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._order(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; called by `draw`."""
        self._epoch = epoch


def check_sampler(sampler: Any) -> None:
    """Reject a sampler whose positions cannot be divided.

    Raises
    ------
    UsageError
        It yields batches, divides the data itself, or has no length.
    """
    if isinstance(sampler, BatchSampler):
        raise UsageError("session.loader: pass a sampler of single positions, and batch_size=… instead of batches")
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            "session.loader: a DistributedSampler divides the data itself; pass the sampler that a single process "
            "would use, or none"
        )
    if not (hasattr(sampler, "__len__") and hasattr(sampler, "__iter__")):
        raise UsageError(f"session.loader: a sampler needs len() and iteration, got {type(sampler).__name__}")
    if len(sampler) == 0:
        raise UsageError("session.loader: the sampler is empty")


def draw(sampler: IndexSampler, length: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the positions of an epoch, int64, shape (len(sampler),).

    The global generators of torch, numpy and Python are seeded for the epoch, and restored afterwards. A generator that
    the sampler has as ``generator`` is seeded, too.

    Parameters
    ----------
    sampler
        The user's.
    length
        Samples in the dataset.
    seed, epoch
        The training's seed and the epoch.

    Raises
    ------
    UsageError
        It yields another number of positions than its length, or some outside the dataset.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
        own.manual_seed(mix(seed, epoch))
    with cpu_seeded(seed, epoch):
        drawn = list(islice(sampler, len(sampler) + 1))  # not all: it may be endless
    try:
        positions = torch.tensor([index(position) for position in drawn], dtype=torch.int64)
    except TypeError as error:
        raise UsageError(f"session.loader: the sampler yields something other than positions: {error}") from None
    if len(positions) != len(sampler):
        number = len(positions) if len(positions) < len(sampler) else "more"
        raise UsageError(f"session.loader: the sampler has length {len(sampler)} but yields {number} positions")
    if int(positions.min()) < 0 or int(positions.max()) >= length:
        raise UsageError(f"session.loader: the sampler yields positions outside the dataset of {length} samples")
    return positions
