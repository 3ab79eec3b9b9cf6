"""Batches that several training jobs in one process fetch once: those with the same data in the same order."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Subset, TensorDataset

from freetrain_parsl.extensions.fusion.optimizers.optimizer_watch import versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.training.data.order import Batch
    from freetrain_parsl.training.extension import DataSource

__all__ = ["MemberBatches", "SharedBatches", "can_be_shared", "same_source"]

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))  # of which nobody changes what others have
_KEPT = 2  # batches: that of the training jobs that are ahead, and that of those behind


def can_be_shared(source: DataSource) -> bool:
    """Return whether batches can be fetched for several jobs: they are in one piece, in an order of our own."""
    return source.sampler is None and source.order.micro_batch is None and source.order.shards is None


def same_source(one: DataSource, other: DataSource) -> bool:
    """Return whether two sources certainly yield the same batches."""
    return (
        one.order == other.order
        and one.collate_fn == other.collate_fn
        and one.num_workers == other.num_workers
        and one.seed_samples == other.seed_samples
        and _same_dataset(one.dataset, other.dataset)
    )


def _same_dataset(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is TensorDataset:
        return len(one.tensors) == len(other.tensors) and all(
            mine.dtype == its.dtype and mine.device == its.device and (mine is its or torch.equal(mine, its))
            for mine, its in zip(one.tensors, other.tensors, strict=True)
        )
    if type(one) is Subset:
        return list(one.indices) == list(other.indices) and _same_dataset(one.dataset, other.dataset)
    return False


class _DatasetWatch:
    """Notes that user code has replaced or changed the tensors of a dataset, which was equal to another one before.

    Parameters
    ----------
    dataset
        The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._known = list(_tensors_of(dataset))
        self._marks = _marks(self._known)

    def is_same(self) -> bool:
        """Return whether the dataset has the tensors that it had at first, unchanged."""
        now = _tensors_of(self._dataset)
        return len(now) == len(self._known) and all(map(is_, now, self._known)) and _marks(now) == self._marks


def _tensors_of(dataset: Any) -> Sequence[Any]:
    """Return the tensors of a dataset that `_same_dataset` compares."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset.tensors if type(dataset) is TensorDataset else ()


def _marks(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """Return where tensors are in memory, and their versions, as far as they have these."""
    return [
        (
            tensor.data_ptr() if tensor.layout == torch.strided and not tensor.is_nested else 0,
            0 if tensor.is_inference() else tensor._version,
        )
        for tensor in tensors
    ]


class SharedBatches:
    """The current batches of one source.

    Each training job gets the same tensors, until one changes them in place: from then on each gets copies.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[int, int], tuple[Batch, Any, list[torch.Tensor], list[int]]] = {}
        self._copying = False

    def get(self, epoch: int, position: int, fetch: Callable[[], tuple[Batch, Any]]) -> tuple[Batch, Any]:
        """Return the batch at a position of an epoch; `fetch` it unless a training job has done so.

        Parameters
        ----------
        epoch, position
            Where the batch begins.
        fetch
            Returns the batch and its data.
        """
        place = (epoch, position)
        known = self._batches.get(place)
        if known is not None and not self._copying and versions_of(known[2]) != known[3]:
            self._copying = True
            known = None
        if known is None:
            batch, data = fetch()
            if not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(data)):
                return batch, data  # an object that each training job may change
            tensors = _tensors(data)
            known = batch, data, tensors, versions_of(tensors)
            self._batches[place] = known
            while len(self._batches) > _KEPT:
                del self._batches[next(iter(self._batches))]
        batch, data, _, _ = known
        # Tensors of its own on the same memory: gradients and flags are each training job's.
        make = torch.clone if self._copying else torch.Tensor.detach
        if type(data) in (list, tuple) and all(isinstance(leaf, torch.Tensor) for leaf in data):
            return batch, type(data)(map(make, data))
        return batch, pytree.tree_map_only(torch.Tensor, make, data)

    @property
    def spoiled(self) -> bool:
        """Whether a training job has changed, in place, a batch that others have, too."""
        return not self._copying and any(
            versions_of(tensors) != known for _, _, tensors, known in self._batches.values()
        )


class MemberBatches:
    """The batches of a source as one training job gets them, until user code changes its dataset.

    Parameters
    ----------
    batches
        Those of all training jobs that share the source.
    source
        The training job's own.
    """

    def __init__(self, batches: SharedBatches, source: DataSource) -> None:
        self._batches = batches
        self._watch = None if source.num_workers else _DatasetWatch(source.dataset)

    def get(self, epoch: int, position: int, fetch: Callable[[], tuple[Batch, Any]]) -> tuple[Batch, Any] | None:
        """See `SharedBatches.get`; ``None`` if the dataset was changed: it is the training job's own now."""
        if self._watch is not None and not self._watch.is_same():
            return None
        return self._batches.get(epoch, position, fetch)


def _tensors(data: Any) -> list[torch.Tensor]:
    if isinstance(data, (list, tuple)) and all(isinstance(leaf, torch.Tensor) for leaf in data):
        return list(data)
    return [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, torch.Tensor)]
