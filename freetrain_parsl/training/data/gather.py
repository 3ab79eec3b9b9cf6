"""Batches of tensors in memory: one indexing operation for each tensor, instead of one for each sample."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

__all__ = ["Gather"]


class Gather:
    """Fetches the batches of a ``TensorDataset`` as its samples would be fetched and collated, bit for bit.

    Parameters
    ----------
    dataset
        The dataset.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self._plain: tuple[torch.Tensor, ...] | None = None  # the tensors of the dataset, if they were found to be so

    @classmethod
    def of(cls, dataset: object, collate_fn: object, num_workers: int) -> Gather | None:
        """Return the one for a loader; ``None`` if code other than torch's makes its samples or batches, or workers."""
        if type(dataset) is not TensorDataset or collate_fn is not None or num_workers:
            return None
        return cls(dataset)

    @property
    def is_possible(self) -> bool:
        """Whether the batches can be fetched like this: user code may replace or change the dataset's tensors."""
        tensors: object = self._dataset.tensors
        if self._plain is None or tensors is not self._plain:
            if not (isinstance(tensors, tuple) and all(map(_is_plain, tensors))):  # a list can change
                return False
            self._plain = tensors
        return not any(tensor.requires_grad for tensor in self._plain)

    def __call__(self, positions: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
        """Return the batch of the samples at `positions` (int64), on a device."""
        batch = [tensor.index_select(0, positions) for tensor in self._dataset.tensors]
        if device.type == "cpu":
            return batch
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in the CPU's memory, with contiguous samples, so that a batch is contiguous, too."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    usual = ordinary and not (tensor.is_quantized or tensor.is_nested)
    return usual and len(tensor) > 0 and tensor[0].is_contiguous()
