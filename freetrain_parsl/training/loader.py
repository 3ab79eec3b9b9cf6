"""The training data: every sample exactly once an epoch, in an order that no number of processes changes.

The order depends on seed and epoch only. Batch `t` of an epoch is the `t`-th run of `batch_size` positions,
whoever trains; the members of the group share it out, the first ones taking one sample more where it does not
divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.rng import mix

if TYPE_CHECKING:
    from freetrain_parsl.training.engine import Engine


class MapDataset(Protocol):
    """A dataset with positions, such as ``torch.utils.data.Dataset`` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


@dataclass(frozen=True)
class Share:
    """One process's part of a global batch.

    Parameters
    ----------
    positions
        Positions in the dataset, int64, shape (local samples,), never empty.
    weight
        How many of them count: all, or none if the batch has fewer samples than there are processes. Such a
        process trains on a sample with weight zero, because it must take part in the collectives.
    batch
        Samples in the whole batch.
    """

    positions: torch.Tensor
    weight: int
    batch: int


@dataclass(frozen=True)
class Order:
    """Which positions are in which batch.

    Parameters
    ----------
    length
        Samples in the dataset.
    batch_size
        Samples in a global batch.
    seed
        The training's seed.
    shuffle
        Whether each epoch has its own permutation; else the order of the dataset.
    drop_last
        Whether to leave out a last batch that is not full.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return min(self.length, self.batches * self.batch_size)

    def epoch(self, epoch: int) -> torch.Tensor:
        """Return the positions of an epoch in order, int64, shape (samples,)."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.length, generator=generator)[: self.samples]

    def share(self, positions: torch.Tensor, batch: int, rank: int, world_size: int) -> Share:
        """Return the part of a process in a batch of an epoch whose order is `positions`."""
        members = positions[batch * self.batch_size : (batch + 1) * self.batch_size]
        base, extra = divmod(len(members), world_size)
        begin = rank * base + min(rank, extra)
        mine = members[begin : begin + base + (1 if rank < extra else 0)]
        if len(mine) == 0:
            return Share(members[:1], 0, len(members))
        return Share(mine, len(mine), len(members))


class SessionLoader:
    """Batches of a dataset, on the session's device; made by ``session.loader``.

    Iterate over it once in each of ``session.epochs``. After a pause, iteration goes on in the middle of the
    epoch. ``len(loader)`` is the number of batches in a whole epoch.

    Raises
    ------
    UsageError
        The dataset has no positions or no samples, or the batch size is not positive.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: MapDataset,
        order: Order,
        *,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.order = order
        self._engine = engine
        self._shares = _Shares(engine, order)
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # torch's Dataset class is not needed, its two methods are
            batch_sampler=self._shares,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=engine.device.type == "cuda",
            persistent_workers=num_workers > 0,
            generator=self._generator,
        )

    def __len__(self) -> int:
        return self.order.batches

    def __iter__(self) -> Iterator[Any]:
        engine = self._engine
        first = engine.begin_pass()
        if first is None:
            return
        # A generator of its own: torch draws the workers' seed at each start; the global one must not move.
        self._generator.manual_seed(mix(self.order.seed, engine.books.epoch, first, engine.group.rank))
        positions = self._shares.start(first)
        fetched = iter(self._loader)
        for batch in range(first, len(self)):
            if batch > first:
                engine.boundary()
            data = to_device(next(fetched), engine.device)
            share = self.order.share(positions, batch, engine.group.rank, engine.group.size)
            engine.hand_out(batch, share)
            yield data
            engine.take_back()
        engine.end_pass(positions)
        engine.boundary()


class _Shares:
    """Batch sampler of this process: its positions of each batch from a given one on."""

    def __init__(self, engine: Engine, order: Order) -> None:
        self._engine = engine
        self._order = order
        self._first = 0
        self._positions = torch.empty(0, dtype=torch.int64)

    def start(self, first: int) -> torch.Tensor:
        """Set the next pass to begin at batch `first` of the current epoch; return the epoch's order."""
        self._first = first
        self._positions = self._order.epoch(self._engine.books.epoch)
        return self._positions

    def __len__(self) -> int:
        return self._order.batches - self._first

    def __iter__(self) -> Iterator[list[int]]:
        group = self._engine.group
        for batch in range(self._first, self._order.batches):
            share = self._order.share(self._positions, batch, group.rank, group.size)
            yield share.positions.tolist()


def check_dataset(dataset: object, batch_size: int, *, drop_last: bool) -> None:
    """Refuse what cannot be shared out exactly.

    Raises
    ------
    UsageError
        The dataset has no positions or no samples, or the batch size is not positive.
    """
    positional = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not positional:
        raise UsageError(
            f"session.loader needs a dataset with len() and positions, got {type(dataset).__name__}; "
            "a stream cannot be shared out so that every sample is seen exactly once"
        )
    if len(dataset) == 0:  # type: ignore[arg-type]  # has __len__, as tested above
        raise UsageError("session.loader: the dataset is empty")
    if batch_size < 1:
        raise UsageError(f"session.loader: batch_size must be at least 1, got {batch_size}")
    if drop_last and len(dataset) < batch_size:  # type: ignore[arg-type]  # has __len__, as tested above
        raise UsageError(
            f"session.loader: drop_last leaves no batch of {batch_size} in {len(dataset)} samples"  # type: ignore[arg-type]  # as above
        )


def to_device(data: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, lists and dictionaries; leave everything else as it is."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return type(data)(to_device(value, device) for value in data)  # type: ignore[call-arg]  # list or tuple
    return data
