"""The order of samples that torch's ``DataLoader`` has in a plain script with the same seed.

A plain loop draws, for each epoch, the seed of the loader's workers and the order from the global generator, or from
the one given to the ``DataLoader``. The order is drawn here in the same way, from copies of the generators' states at
the start of the loop. All processes run the same code until there, so they have the same states, in all fragments.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from freetrain_parsl.training.data.lazy_positions import in_torchs_order, is_long
from freetrain_parsl.training.data.random_streams import cpu_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from freetrain_parsl.training.data.lazy_positions import Positions

__all__ = ["TorchOrder", "torch_order_like"]


class _States(NamedTuple):
    """States of the global generators of the CPU, numpy and Python, and of the loader's own."""

    torch: torch.Tensor
    numpy: Any
    python: Any
    own: tuple[torch.Tensor, ...]


class TorchOrder:
    """The positions of each epoch as torch's ``DataLoader`` draws them; an `IndexSampler`.

    Parameters
    ----------
    batches
        Yields the batches of an epoch as a plain ``DataLoader`` would ask for them.
    generator
        That of the ``DataLoader``, if any.
    keeps_workers
        Whether its workers persist: their seed is then drawn once, not for each epoch.
    """

    def __init__(self, batches: BatchSampler, generator: torch.Generator | None, *, keeps_workers: bool) -> None:
        self._batches = batches
        self._generator = generator
        self._keeps_workers = keeps_workers
        own = [generator, getattr(batches.sampler, "generator", None)]
        self._own = list({id(each): each for each in own if isinstance(each, torch.Generator)}.values())
        self._first: _States | None = None
        self._next: tuple[int, _States] | None = None  # epoch, and the states before it is drawn

    def __len__(self) -> int:
        return len(self._batches.sampler)  # type: ignore[arg-type]  # checked by check_sampler

    def __iter__(self) -> Iterator[int]:
        return iter(chain.from_iterable(self._batches))

    def begin(self) -> None:
        """Take the generators' states: the loop begins."""
        self._first = self._states()

    def positions(self, epoch: int) -> Positions:
        """Return the positions of an epoch, without those of an incomplete last batch if it is dropped."""
        assert self._first is not None, "the loop has begun"
        known, states = (0, self._first) if self._next is None or self._next[0] > epoch else self._next
        with cpu_kept():  # the loader's own generator continues, as in a plain script
            self._set(states)
            for earlier in range(known, epoch):
                self._skip(earlier)
            positions = self._draw(epoch)
            self._next = epoch + 1, self._states()
        return positions

    def _draw(self, epoch: int) -> Positions:
        sampler: Any = self._batches.sampler
        if epoch == 0 or not self._keeps_workers:
            self._draw_seed(self._generator)  # of the workers, also without any
        if is_long(sampler) and sampler.generator is None:
            return in_torchs_order(sampler)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return torch.tensor(list(chain.from_iterable(self._batches)), dtype=torch.int64)

    def _skip(self, epoch: int) -> None:
        """Draw what an earlier epoch has drawn."""
        sampler: Any = self._batches.sampler
        if type(sampler) is RandomSampler and sampler.generator is None:  # it draws a seed, and the order with that
            if epoch == 0 or not self._keeps_workers:
                self._draw_seed(self._generator)
            self._draw_seed(None)
        else:
            self._draw(epoch)

    @staticmethod
    def _draw_seed(generator: torch.Generator | None) -> None:
        torch.empty((), dtype=torch.int64).random_(generator=generator)

    def _states(self) -> _States:
        own = tuple(generator.get_state() for generator in self._own)
        return _States(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate(), own)  # noqa: NPY002 - samplers may draw from it

    def _set(self, states: _States) -> None:
        torch.set_rng_state(states.torch)
        np.random.set_state(states.numpy)  # noqa: NPY002 - the same
        random.setstate(states.python)
        for generator, state in zip(self._own, states.own, strict=True):
            generator.set_state(state)


def torch_order_like(loader: DataLoader[Any], *, batch_size: int, drop_last: bool, **_options: Any) -> TorchOrder:
    """Return the order of a user's ``DataLoader``, with another batch size if given."""
    batches = BatchSampler(loader.sampler, batch_size, drop_last)
    return TorchOrder(batches, loader.generator, keeps_workers=loader.persistent_workers)
