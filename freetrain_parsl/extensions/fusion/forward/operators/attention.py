"""Attention: the members are folded into the batch, because `torch.vmap` has only slow forms of the fast kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule

_MATRIX = 2  # dimensions of one head's queries, keys or values


def scaled_dot_product_attention(
    fused: FusedOperators,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attend with all members' batches as one batch; with dropout, each member draws its own mask."""
    if not any(map(fused.is_stacked, (query, key, value, attn_mask))):
        return NotImplemented if dropout_p == 0 else _row_by_row(fused, func, locals())
    if dropout_p != 0:
        return _row_by_row(fused, func, locals())
    query, key, value = (fused.rows(tensor) for tensor in (query, key, value))
    batch = query.shape[1:-_MATRIX]
    foldable = len(batch) > 0 and key.dim() == value.dim() == query.dim() and key.shape[1] == value.shape[1] == batch[0]
    if attn_mask is not None:
        attn_mask = _mask(fused, attn_mask, query, fold=foldable)
    with fused.level.suspended():
        if foldable:
            query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        output = func(query, key, value, attn_mask, 0.0, is_causal, **options)
        if foldable:
            output = output.unflatten(0, (fused.size, -1))
    return fused.wrap(output)


def _mask(fused: FusedOperators, mask: torch.Tensor, query: torch.Tensor, *, fold: bool) -> torch.Tensor:
    """Return the mask for the folded batch, expanded only where members or samples have masks of their own."""
    own_dimensions = query.dim() - 1
    of_samples = mask.dim() == own_dimensions and mask.shape[0] > 1
    if not fused.is_stacked(mask) and not (fold and of_samples):
        return mask
    rows = fused.rows(mask)
    rows = rows.view(len(rows), *[1] * (own_dimensions - mask.dim()), *mask.shape)
    if not fold:
        return rows
    return rows.expand(-1, query.shape[1], *[-1] * (own_dimensions - 1)).flatten(0, 1)


def _row_by_row(fused: FusedOperators, func: Any, given: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return fused.row_by_row(func, [given[name] for name in names], given["options"])


RULES: dict[Any, Rule] = {F.scaled_dot_product_attention: scaled_dot_product_attention}
