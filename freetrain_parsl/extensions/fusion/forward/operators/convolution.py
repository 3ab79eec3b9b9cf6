"""Convolutions of all members as one convolution with groups, whose kernel also adds the biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule


def convolution(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolve the channels of all members as the channels of one batch.

    `torch.vmap` does so, too, but adds the biases in a further pass, and computes their gradients in another.
    """
    if bias is None or not fused.is_stacked(weight) or input.dim() != weight.dim():
        return NotImplemented
    values, dimension = fused.level.unwrap(input)
    if dimension is None and groups > 1:
        return NotImplemented
    weights, biases = fused.rows(weight), fused.rows(bias)
    with fused.level.suspended():
        if dimension is not None:  # else one convolution with the outputs of all members
            values, groups = _channels(values, dimension), groups * fused.size
        output = func(values, weights.flatten(0, 1), biases.flatten(), stride, padding, dilation, groups)
        return fused.wrap(output.unflatten(1, (fused.size, -1)).movedim(1, 0))


def transposed_convolution(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Do the same for a transposed convolution, whose arguments have another order."""
    values, dimension = fused.level.unwrap(input)
    if bias is None or dimension is None or not fused.is_stacked(weight) or input.dim() != weight.dim():
        return NotImplemented
    weights, biases = fused.rows(weight), fused.rows(bias)
    with fused.level.suspended():
        options = (stride, padding, output_padding, groups * fused.size, dilation)
        output = func(_channels(values, dimension), weights.flatten(0, 1), biases.flatten(), *options)
        return fused.wrap(output.unflatten(1, (fused.size, -1)).movedim(1, 0))


def _channels(values: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return the channels of all members as those of one batch."""
    return values.movedim(dimension, 1).flatten(1, 2)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed_convolution),
}
