"""Layers and losses of all members in one kernel each: linear, embedding, normalization, convolution, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.per_member import PerMember
from freetrain_parsl.extensions.fusion.forward.loss_items import note_items
from freetrain_parsl.extensions.fusion.forward.sparse import is_sparse

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule


_LARGE = 1 << 14  # elements
_MATRIX = 2  # dimensions of one head's queries, keys or values


def linear(
    fused: FusedOperators, func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Any:
    """Multiply all members' samples with their weights in one batched product, or with one weight as one batch."""
    if not fused.is_stacked(weight):
        if not fused.is_stacked(input) or (bias is not None and fused.is_stacked(bias)):
            return NotImplemented
        samples = fused.rows(input)
        with fused.level.suspended():
            return fused.wrap(func(samples, weight, bias))
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


def addmm(
    fused: FusedOperators, func: Any, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any
) -> Any:
    """Do the same with one weight for layers that are written as ``addmm``, such as those of GPT-2."""
    if options or not fused.is_stacked(mat1) or fused.is_stacked(mat2) or fused.is_stacked(input) or input.dim() != 1:
        return NotImplemented
    rows = fused.rows(mat1)
    with fused.level.suspended():
        output = func(input, rows.flatten(0, 1), mat2).unflatten(0, rows.shape[:2])
    return fused.wrap(output)


def linear_rows(inputs: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
    """Return the products [B, samples, out] of [B, samples, in] and [B, out, in]."""
    transposed = weights.transpose(1, 2)
    return torch.bmm(inputs, transposed) if biases is None else torch.baddbmm(biases.unsqueeze(1), inputs, transposed)


def likelihood(
    fused: FusedOperators,
    func: Any,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,  # of cross_entropy only
) -> Any:
    """Compute the losses of all members' samples as of one batch, then each member's sum or mean."""
    plain = size_average is None and reduce is None and reduction in {"mean", "sum"}
    classes = not target.is_floating_point() and input.dim() > 1
    if not plain or not classes or not fused.is_stacked(input):
        return NotImplemented
    logits, labels = fused.rows(input), fused.rows(target)
    weights = None if weight is None else fused.rows(weight)
    options = {"label_smoothing": label_smoothing} if label_smoothing and weights is None else {}
    with fused.level.suspended():
        losses = func(
            logits.flatten(0, 1), labels.flatten(0, 1), ignore_index=ignore_index, reduction="none", **options
        )
        losses, counts = losses.view(fused.size, -1), (labels != ignore_index).flatten(1)
        items = counts.sum(1)
        if weights is not None:
            of_classes = weights.gather(1, torch.where(counts, labels.flatten(1), 0)) * counts
            losses, items = losses * of_classes, of_classes.sum(1)
            if label_smoothing:
                losses = torch.lerp(losses, torch.where(counts, _evenly(logits, weights), 0.0), label_smoothing)
        result = losses.sum(1)
        if reduction == "mean":
            result = result / items
            note_items(result, items, labels[0].numel(), ignore_index, has_weights=weights is not None)
    return fused.wrap(result)


def _evenly(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the losses, [B, targets], if each sample were of all classes alike, with each class's weight."""
    factors = weights.view(*weights.shape[:1], 1, *weights.shape[1:], *[1] * (logits.dim() - 3))
    return -(logits.log_softmax(2) * factors).mean(2).flatten(1)


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
    if not fused.is_stacked(weight) and not scale_grad_by_freq:
        indices = fused.rows(input)
        with fused.level.suspended():
            output = func(indices, weight, padding_idx)
        return fused.wrap(output)
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
    if fused.is_stacked(input) and not any(each is not None and fused.is_stacked(each) for each in (weight, bias)):
        values = fused.rows(input)
        with fused.level.suspended():
            return fused.wrap(func(values, normalized_shape, weight, bias, eps))
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


def sparse_product(fused: FusedOperators, func: Any, input: Any, mat2: Any, **options: Any) -> Any:
    """Multiply one sparse matrix with the columns of all members as those of one matrix."""
    if not isinstance(input, torch.Tensor) or not is_sparse(input):
        return NotImplemented
    if options or not fused.is_stacked(mat2) or mat2.dim() != _MATRIX:
        return NotImplemented
    rows = fused.rows(mat2)
    with fused.level.suspended():
        output = func(input, rows.transpose(0, 1).flatten(1))
        return fused.wrap(output.unflatten(1, (fused.size, -1)).transpose(0, 1))


_PRECISION = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # in which torch takes a number of Python


def scaled(fused: FusedOperators, func: Any, input: Any, other: Any, **options: Any) -> Any:
    """Multiply with a number that each member has for itself, as the scale of LoRA."""
    if not isinstance(other, PerMember) or options or not isinstance(input, torch.Tensor):
        return NotImplemented
    if not input.is_floating_point():
        return fused.row_by_row(func, (input, other), {})
    rows = fused.rows(input)
    with fused.level.suspended():
        kind = _PRECISION.get(rows.dtype, rows.dtype)
        column = torch.tensor(other.values, dtype=kind, device=rows.device).view(-1, *[1] * (rows.dim() - 1))
        output = func(rows, column).to(rows.dtype)
    return fused.wrap(output)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), scaled),
    **dict.fromkeys((torch.mm, torch.Tensor.mm, torch.spmm, torch.sparse.mm), sparse_product),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), sparse_product),
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys((F.cross_entropy, F.nll_loss), likelihood),
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.embedding: torch_embedding,
    torch.embedding_bag: embedding_bag,
    **dict.fromkeys(_STACKED_WHEN_CREATED, empty_tensor),
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed_convolution),
    F.scaled_dot_product_attention: scaled_dot_product_attention,
}
