"""The assignment of samples to batches and of batches to members; pure arithmetic.

The order of an epoch depends only on seed and epoch. A batch is the next range of positions in this order, whatever the
group; the members of the group divide it. What one member runs through the model at a time is a *piece*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.training.data.audit import checksum
from freetrain_parsl.training.data.random_streams import mix

if TYPE_CHECKING:
    from freetrain_parsl.training.data.lazy_positions import Positions


@dataclass(frozen=True)
class Piece:
    """The samples that a member runs through the model at a time."""

    positions: torch.Tensor  # positions in the dataset, int64, shape (samples,), never empty
    weight: int
    """How many of them count: all, or none if this member has no samples left. It then trains on `Order.least`
    samples with weight zero, because it must take part in the collectives."""
    shard: int  # number of the shard of the batch that it belongs to; seeds its random numbers
    last_of_shard: bool
    last: bool  # of this member's part of the batch

    @cached_property
    def checksum(self) -> int:
        """See `audit.checksum`."""
        return checksum(self.positions)


@dataclass(frozen=True)
class Batch:
    """One member's view of a global batch."""

    positions: torch.Tensor
    """Positions of all its samples, int64, shape (samples,)."""
    pieces: tuple[Piece, ...]
    """This member's pieces, in order; never empty, and as many as on other members, unless `Order.shards` is fixed."""
    shards: int
    """Number of shards that have samples."""

    @property
    def samples(self) -> int:
        """Samples of the whole batch."""
        return self.positions.shape[0]

    @property
    def is_divided(self) -> bool:
        """Whether its samples are in several pieces, of this member or of others."""
        return self.pieces[0].positions is not self.positions

    @cached_property
    def checksum(self) -> int:
        """See `audit.checksum`; zero if there is nothing to verify, as one piece has all samples."""
        return checksum(self.positions) if self.is_divided else 0


@dataclass(frozen=True)
class Order:
    """Which positions are in which batch, and how a batch is divided.

    Parameters
    ----------
    length
        Samples in the dataset.
    batch_size
        Samples in a global batch; per member if `scaled`.
    seed
        The training job's seed.
    shuffle
        Whether each epoch has its own permutation; otherwise the order of the dataset is used.
    drop_last
        Whether to drop an incomplete last batch.
    micro_batch
        Maximum samples in a piece; ``None``: no limit.
    shards
        Number of shards into which each batch is divided, whatever the number of members, each with its own pieces;
        ``None``: one shard per member.
    scaled
        Whether the batch grows with the number of members.
    drawn
        Positions in an epoch that a sampler yields, perhaps with repetitions; ``None``: each sample once.
    batch_range
        The smallest and the largest batch size, between which it may change; ``None``: it does not change.
    least
        Minimum samples in a piece, unless the batch has fewer: BatchNorm fails on a single one. A piece may have more
        than `micro_batch` for it.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    micro_batch: int | None = None
    shards: int | None = None
    scaled: bool = False
    drawn: int | None = None
    batch_range: tuple[int, int] | None = None
    least: int = 1

    @property
    def batches(self) -> int:
        """Batches of `batch_size` in an epoch."""
        full, rest = divmod(self._available, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return min(self._available, self.batches * self.batch_size)

    @property
    def _available(self) -> int:
        return self.length if self.drawn is None else self.drawn

    def epoch(self, epoch: int) -> torch.Tensor:
        """Return the positions of an epoch in order, int64, shape (samples,); not if a sampler draws them."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.length, generator=generator)[: self.samples]

    def batch(self, positions: Positions, begin: int, rank: int, world_size: int, size: int | None = None) -> Batch:
        """Return a member's part of the batch after `begin` samples; without a size, it has as many as at the start."""
        if size is None:
            size = self.batch_size * world_size if self.scaled else self.batch_size
        members = positions[begin : begin + size]
        if world_size == 1 and self.shards is None and self.micro_batch is None:  # the general case, sooner
            return Batch(members, (Piece(members, members.shape[0], 0, last_of_shard=True, last=True),), 1)
        count = max(1, min(self.shards or world_size, len(members) // self.least))
        mine = range(rank, rank + 1) if self.shards is None else _part(count, rank, world_size)
        pieces: list[Piece] = []
        for shard in mine:
            part = _part(len(members), shard, count)
            pieces.extend(self._pieces(members[part.start : part.stop], shard) if shard < count else ())
        idle = Piece(members[: self.least], 0, count + rank, last_of_shard=True, last=False)
        most = 1 if self.shards else self._number_of_pieces(len(_part(len(members), 0, count)))
        pieces.extend([idle] * (most - len(pieces)))
        pieces[-1] = replace(pieces[-1], last=True)
        return Batch(members, tuple(pieces), count)

    def _pieces(self, positions: torch.Tensor, shard: int) -> list[Piece]:
        count = self._number_of_pieces(len(positions))
        if self.least == 1:
            chunks = torch.split(positions, self.micro_batch or len(positions))
        else:
            chunks = torch.split(positions, [len(_part(len(positions), number, count)) for number in range(count)])
        return [
            Piece(chunk, len(chunk), shard, last_of_shard=number == count - 1, last=False)
            for number, chunk in enumerate(chunks)
        ]

    def _number_of_pieces(self, samples: int) -> int:
        """Return into how many pieces the samples of a shard are divided."""
        if self.micro_batch is None:
            return 1
        return max(1, min(-(-samples // self.micro_batch), samples // self.least))


def _part(total: int, index: int, count: int) -> range:
    """Return the `index`-th of `count` parts of `total` items; if `total` is not divisible, first parts are larger."""
    base, extra = divmod(total, count)
    begin = index * base + min(index, extra)
    return range(begin, begin + base + (1 if index < extra else 0))
