"""Normalizations with each member's weights and running statistics in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule

_LARGE = 1 << 14  # elements


def batch_norm(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize the channels of all members as the channels of one batch.

    `torch.vmap` does so, too, but multiplies with the weights and adds the biases separately.
    """
    values, dimension = fused.level.unwrap(input)
    if dimension is None or input.dim() < 2:  # torch raises its own error
        return NotImplemented
    statistics = [None if each is None else fused.rows(each) for each in (running_mean, running_var)]
    affine = [None if each is None else fused.rows(each) for each in (weight, bias)]
    with fused.level.suspended():
        folded = values.movedim(dimension, 1).flatten(1, 2)
        flat = [None if rows is None else rows.reshape(-1) for rows in statistics]
        factors = [None if rows is None else rows.reshape(-1) for rows in affine]
        output = func(folded, *flat, *factors, training, momentum, eps).unflatten(1, (fused.size, -1))
        for rows, updated in zip(statistics, flat, strict=True):
            if rows is not None and updated is not None and training and updated.data_ptr() != rows.data_ptr():
                rows.copy_(updated.view(rows.shape))
    return fused.wrap(output.movedim(1, 0))  # some rules of torch.vmap, as of grid_sample, are wrong for others


def layer_norm(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalize all members' samples, then multiply and add in one operator; large rows one after the other."""
    if weight is None or bias is None or not fused.is_stacked(weight):
        return NotImplemented
    values, weights, biases = fused.rows(input), fused.rows(weight), fused.rows(bias)
    with fused.level.suspended():
        if values[0].numel() >= _LARGE:  # in which torch's kernel for all three saves more than a call per member costs
            members = zip(values.unbind(), weights.unbind(), biases.unbind(), strict=True)
            return fused.wrap(torch.stack([func(row, normalized_shape, *affine, eps) for row, *affine in members]))
        between = [1] * (values.dim() - weights.dim())
        weights, biases = (each.view(fused.size, *between, *each.shape[1:]) for each in (weights, biases))
        output = torch.addcmul(biases, func(values, normalized_shape, eps=eps), weights)
    return fused.wrap(output)


RULES: dict[Any, Rule] = {F.batch_norm: batch_norm, F.layer_norm: layer_norm}
