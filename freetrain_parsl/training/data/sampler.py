"""A user's sampler: the positions of an epoch, the same in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils.data import DistributedSampler
from torch.utils.data.sampler import BatchSampler

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.random_streams import mix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["IndexSampler", "check_sampler", "draw"]


class IndexSampler(Protocol):
    """What ``session.loader`` needs of a sampler: a length, and positions in the dataset."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


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

    torch's global generator, from which samplers draw unless they have one of their own, is seeded for the epoch, and
    restored afterwards. So is a generator that the sampler has as ``generator``.

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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, epoch))
        positions = torch.tensor([int(position) for position in sampler], dtype=torch.int64)
    if len(positions) != len(sampler):
        raise UsageError(f"session.loader: the sampler has length {len(sampler)} but yields {len(positions)} positions")
    if int(positions.min()) < 0 or int(positions.max()) >= length:
        raise UsageError(f"session.loader: the sampler yields positions outside the dataset of {length} samples")
    return positions
