"""Sparse tensors, as the adjacency matrix of a graph: no level stacks them, so all members must have the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_sparse", "same_sparse"]

_PARTS: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),  # of one that is not coalesced, too
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_bsr), (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
    ),
    **dict.fromkeys(
        (torch.sparse_csc, torch.sparse_bsc), (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
    ),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no ordinary memory: `data_ptr` and `stride` raise errors for it."""
    return tensor.layout != torch.strided


def same_sparse(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, of which one is sparse, have the same entries in the same order.

    The entries are compared, not where they are: each training job makes a matrix of its own, and reading it takes a
    small part of the time of a product with it.
    """
    parts = _PARTS.get(one.layout)
    if parts is None or other.layout != one.layout or one.requires_grad or other.requires_grad:
        return False
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.layout == torch.sparse_coo and one.is_coalesced() != other.is_coalesced():
        return False
    return all(torch.equal(part(one), part(other)) for part in parts)
