"""Linear layers, embeddings and classification losses of all members in one kernel each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from freetrain_parsl.errors import CannotFuse

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule


def linear(
    fused: FusedOperators, func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Any:
    """Multiply all members' samples with their weights in one batched product."""
    if not fused.is_stacked(weight):
        return NotImplemented
    shape = input.shape
    weights = fused.rows(weight)
    biases = None if bias is None else fused.rows(bias)
    inputs = fused.rows(input) if fused.is_stacked(input) else None
    with fused.level.suspended():
        if inputs is None:
            inputs = input.reshape(1, -1, shape[-1]).expand(fused.size, -1, -1)
        elif inputs.dim() != 3:
            inputs = inputs.reshape(fused.size, -1, shape[-1])
        output = linear_rows(inputs, weights, biases)
        if len(shape) != 2:
            output = output.view(fused.size, *shape[:-1], output.shape[-1])
    return fused.wrap(output)


def linear_rows(inputs: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
    """Return the products [B, samples, out] of [B, samples, in] and [B, out, in]."""
    transposed = weights.transpose(1, 2)
    return torch.bmm(inputs, transposed) if biases is None else torch.baddbmm(biases.unsqueeze(1), inputs, transposed)


def cross_entropy(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the losses of all members' samples as of one batch, then each member's sum or mean."""
    plain = weight is None and size_average is None and reduce is None and reduction in {"mean", "sum"}
    classes = not target.is_floating_point() and input.dim() > 1
    if not plain or not classes or not fused.is_stacked(input):
        return NotImplemented
    logits, labels = fused.rows(input), fused.rows(target)
    with fused.level.suspended():
        losses = func(
            logits.flatten(0, 1),
            labels.flatten(0, 1),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        result = losses.view(fused.size, -1).sum(1)
        if reduction == "mean":
            result = result / (labels.flatten(1) != ignore_index).sum(1)
    return fused.wrap(result)


def embedding(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up in one table of all members' rows, where each member's indices begin after those of the one before.

    `torch.vmap` ignores `padding_idx` for indices that differ between members.
    """
    if sparse:
        raise CannotFuse("an embedding with sparse gradients")
    if not fused.is_stacked(weight) and not fused.is_stacked(input):
        return NotImplemented
    if max_norm is not None:  # changes the table in place
        options = {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq}
        return fused.row_by_row(func, (input, weight, padding_idx), options, changes_arguments=True)
    tables, indices = fused.rows(weight), fused.rows(input)
    with fused.level.suspended():
        words = tables.shape[1]
        offsets = torch.arange(fused.size, device=indices.device) * words
        shifted = indices + offsets.view(-1, *[1] * (indices.dim() - 1))
        output = func(shifted, tables.reshape(-1, tables.shape[-1]), scale_grad_by_freq=scale_grad_by_freq)
        if padding_idx is not None:  # the row for padding gets no gradient
            padding = (indices == padding_idx % words).unsqueeze(-1)
            output = torch.where(padding, output.detach(), output)
    return fused.wrap(output)


def torch_embedding(
    fused: FusedOperators,
    func: Any,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Apply the same rule to the function that `F.embedding` calls: it has another order of arguments, and no None."""
    given = None if padding_idx < 0 else padding_idx
    return embedding(fused, F.embedding, indices, weight, given, None, 2.0, scale_grad_by_freq, sparse)


def embedding_bag(fused: FusedOperators, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run row by row, without sparse gradients; with `max_norm` it changes the weights."""
    if kwargs.get("sparse"):
        raise CannotFuse("an embedding bag with sparse gradients")
    return fused.row_by_row(func, args, kwargs, changes_arguments=True)


_STACKED_WHEN_CREATED = (
    torch.zeros,
    torch.empty,
    torch.zeros_like,
    torch.empty_like,
    torch.Tensor.new_zeros,
    torch.Tensor.new_empty,
)


def empty_tensor(fused: FusedOperators, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Create one row per member: such tensors are made to be written to, and members write their own values."""
    tensor = func(*args, **kwargs)
    if (
        fused.is_stacked(tensor)
        or tensor.requires_grad
        or kwargs.get("out") is not None
        or tensor.layout != torch.strided
    ):
        return tensor
    with fused.level.suspended():
        stack = tensor.expand(fused.size, *tensor.shape).clone(memory_format=torch.contiguous_format)
    return fused.wrap(stack)


RULES: dict[Any, Rule] = {
    F.linear: linear,
    F.cross_entropy: cross_entropy,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.embedding: torch_embedding,
    torch.embedding_bag: embedding_bag,
    **dict.fromkeys(_STACKED_WHEN_CREATED, empty_tensor),
}
