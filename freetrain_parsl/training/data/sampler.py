"""A user's sampler: the positions of an epoch, the same in every process."""

from __future__ import annotations

from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.lazy_positions import is_long, seeded_by_chunk
from freetrain_parsl.training.data.random_streams import cpu_seeded, mix
from freetrain_parsl.training.data.stream import Stream
from freetrain_parsl.training.data.torch_order import TorchOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from freetrain_parsl.training.data.lazy_positions import Positions

__all__ = ["EpochOrder", "IndexSampler", "check_sampler", "chosen_sampler", "draw"]


class IndexSampler(Protocol):
    """What ``session.loader`` needs of a sampler: a length, and positions in the dataset."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class EpochOrder:
    """The positions of each epoch as a function gives them; an `IndexSampler`.

    Raises
    ------
    UsageError
        `order` is not a function of the epoch, or yields nothing with a length.
    """

    def __init__(self, order: Any, seed: int) -> None:
        if not callable(order):
            given = repr(order) if isinstance(order, str) else type(order).__name__
            raise UsageError(f"session.loader: order is 'torch' or a function: epoch -> positions; got {given}")
        self._order: Callable[[int], Sequence[int]] = order
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


def chosen_sampler(
    sampler: Any,
    order: Callable[[int], Sequence[int]] | str | None,
    dataset: Any,
    batch_size: int,
    seed: int,
    *,
    shuffle: bool,
    drop_last: bool,
) -> IndexSampler | None:
    """Return what yields the positions of an epoch; ``None``: the session's own order. See ``session.loader``.

    Raises
    ------
    UsageError
        Its positions cannot be divided, or there are two of them.
    """
    if sampler is None and order is None:
        return None
    if isinstance(dataset, Stream):
        raise UsageError("session.loader: a stream has one order; it takes no sampler")
    if order == "torch":
        if sampler is None:
            sampler = RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
        check_sampler(sampler, len(dataset))
        sampler = TorchOrder(BatchSampler(sampler, batch_size, drop_last), None, keeps_workers=False)
    elif order is not None:
        if sampler is not None:
            raise UsageError("session.loader: sampler and order both give the positions of an epoch; pass one")
        sampler = EpochOrder(order, seed)
    check_sampler(sampler, len(dataset))
    if drop_last and len(sampler) < batch_size:
        raise UsageError(f"session.loader: drop_last leaves no batch of {batch_size} in {len(sampler)} samples")
    return sampler  # type: ignore[no-any-return]  # checked


def check_sampler(sampler: Any, length: int) -> None:
    """Reject a sampler whose positions in a dataset of this length cannot be divided.

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
    if is_long(sampler) and len(sampler.data_source) > length:
        raise UsageError(f"session.loader: the sampler yields positions outside the dataset of {length} samples")


def draw(sampler: IndexSampler, length: int, seed: int, epoch: int) -> Positions:
    """Return the positions of an epoch: as many as the sampler's length, or fewer in torch's order.

    The global generators of torch, numpy and Python are seeded for the epoch, and restored afterwards. A generator that
    the sampler has as ``generator`` is seeded, too.

    Raises
    ------
    UsageError
        It yields another number of positions than its length, or some outside the dataset.
    """
    if isinstance(sampler, TorchOrder):
        return _within(sampler.positions(epoch), length)
    if is_long(sampler):
        return seeded_by_chunk(cast("RandomSampler", sampler), seed, epoch)
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
    return _within(positions, length)


def _within(positions: Positions, length: int) -> Positions:
    """Check positions in memory; those drawn lazily are below the length of the sampler's own data."""
    if isinstance(positions, torch.Tensor) and (int(positions.min()) < 0 or int(positions.max()) >= length):
        raise UsageError(f"session.loader: the sampler yields positions outside the dataset of {length} samples")
    return positions
