"""What the graph of a loss tells about it: a mean over samples, a mean over items, or a sum.

A process computes the loss of its share of the batch, so the shares have to be weighed: means by their numbers of
samples or of items, sums not at all. A plain loop never has to say which of them a loss is. The last operations of the
loss are looked at: torch's own losses know their ``reduction``. What cannot be known is asked for.

Only the structure is looked at, and what is the same in all processes: they must decide alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import nn

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.exchange.shared_results import Shared

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "SAME_VALUE",
    "LossReader",
    "MeanOverItems",
    "Reduction",
    "Weighing",
    "check_weighing",
    "checked_reduction",
    "item_count",
    "scalar",
]

Reduction = Literal["mean", "sum", "batch"]

_MEAN, _SUM = 1, 2  # torch's values of ``_saved_reduction``
_UNSIGNED = 1 << 64  # how autograd shows negative integers: as if they were unsigned
_IGNORED = -100  # torch's default for ``ignore_index``
_MOST_NODES = 20_000  # looked at for one loss
_FIRST, _EVERY = 16, 64  # looks at losses with several terms

_MEANS_OVER_ITEMS = ("NllLossBackward0", "NllLoss2DBackward0", "MeanOverItemsBackward")
_SUMS = ("SumBackward0", "SumBackward1")
_MEANS = ("MeanBackward0", "MeanBackward1")
_TERMS = ("AddBackward0", "SubBackward0", "NegBackward0", "RsubBackward1", "StackBackward0", "CatBackward0")
_PRODUCTS = ("MulBackward0", "MulBackward1")
SAME_VALUE: Final = (
    "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0",
    "CloneBackward0", "ToCopyBackward0", "AliasBackward0",
)  # fmt: skip
"""Operations that leave a loss what it is."""

# Operations between a parameter and a penalty on it; those that take data, such as Addmm, are not among them.
_ON_PARAMETERS = {
    "AccumulateGrad", "PowBackward0", "AbsBackward0", "DivBackward0", "ExpBackward0", "LogBackward0",
    "SqrtBackward0", "ReluBackward0", "SigmoidBackward0", "SoftplusBackward0", "ClampBackward0", "ClampMinBackward0",
    "MmBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0", "SelectBackward0",
    "SliceBackward0", "LinalgVectorNormBackward0", "NormBackward1", "SoftmaxBackward0", "LogSoftmaxBackward0",
    "UnbindBackward0", "SplitBackward0", "DiagonalBackward0", "RepeatBackward0",
    *_PRODUCTS, *_TERMS, *SAME_VALUE, *_SUMS, *_MEANS,
}  # fmt: skip


class Weighing(NamedTuple):
    """How the losses of the shares of a batch are weighed.

    Parameters
    ----------
    reduction
        As for ``session.step``.
    items
        Number of items that the loss is a mean over; ``None``: the samples.
    """

    reduction: Reduction
    items: torch.Tensor | float | None


_Kind = Literal["mean", "constant", "loss sum", "sum"]


class _Term(NamedTuple):
    """A summand of a loss.

    Parameters
    ----------
    kind
        ``constant``: it does not depend on samples; ``loss sum``: one of torch's losses that is a sum; ``sum``: another
        sum.
    node
        Its node of the graph.
    times
        Whether it is multiplied by a constant.
    path
        Where the node is.
    """

    kind: _Kind
    node: Any
    times: bool
    path: _Path


class _Path(NamedTuple):
    """How to reach a node from the end of a graph: from the node before, over its input number `place`."""

    before: _Path | None
    place: int


class MeanOverItems(torch.autograd.Function):
    """A loss as it is, and the number of items that it is a mean over, where its graph does not have it.

    ``apply`` has the loss, the number of items, and how many there would be if each counted alike, 0 if unknown: where
    this is the number of samples, the loss may be a mean over these.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, items: torch.Tensor, targets: int) -> torch.Tensor:
        """Return the loss."""
        ctx.items, ctx.targets = items, targets
        return loss.clone()  # which may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ARG004
        """Return the gradient."""
        return gradient, None, None


class LossReader:
    """Returns how losses are weighed: as the user says, or as their graphs show.

    Graphs of losses with several terms are looked at in the first batches, and now and then; items are read in each.
    """

    def __init__(self) -> None:
        # By number of the step in its batch, last operation, and whether the batch has further samples; with the place
        # of a loss that knows its items.
        self._known: dict[tuple[int, str, bool], tuple[Weighing, _Path | None]] = {}
        self._looks = 0
        self._gives_items: bool | None = None  # whether the user gives items; None: before the first loss

    def weighing(
        self,
        loss: torch.Tensor,
        items: torch.Tensor | float | None,
        reduction: Reduction | None,
        *,
        samples: int,
        batch: int,
        step: int,
        gathered: bool,
    ) -> Weighing:
        """Return how a loss is to be weighed.

        Parameters
        ----------
        loss
            A scalar.
        items, reduction
            What the user says, as for ``session.step``.
        samples
            How many samples this process has run through the model for it.
        batch
            How many samples the whole batch has.
        step
            Number of the step in its batch.
        gathered
            Whether ``session.gather`` was used in this batch: then it may be a loss of the whole batch.

        Raises
        ------
        UsageError
            It cannot be known, or items are given for some batches only.
        """
        if self._gives_items is not None and self._gives_items != (items is not None):
            raise UsageError("session.step: pass items=… for all batches or for none, so that losses can be averaged")
        self._gives_items = items is not None
        if items is not None or reduction is not None:
            return Weighing(reduction or "mean", items)
        name = type(loss.grad_fn).__name__
        if name in _MEANS:
            return Weighing("mean", None)
        self._looks += 1
        whole = 0 if samples == batch else batch
        key = step, name, bool(whole)
        if key in self._known and name in _TERMS and self._looks > _FIRST and self._looks % _EVERY:
            weighing, path = self._known[key]
            if path is None:
                return weighing
            node = _follow(loss.grad_fn, path)
            if type(node).__name__ in _MEANS_OVER_ITEMS and _is_readable(node):
                return _items_of(node)
        self._known[key] = _look(loss, samples, whole, gathered=gathered)
        return self._known[key][0]


def check_weighing(weighing: Weighing, *, one_piece: bool, measured: bool) -> None:
    """Check that a batch is one for such a loss.

    Parameters
    ----------
    weighing
        That of the loss.
    one_piece
        Whether each process has its part of the batch in one piece.
    measured
        Whether the noise of the gradient is measured, to choose the size of the batch.

    Raises
    ------
    UsageError
        It is not.
    """
    if weighing.reduction == "batch" and not one_piece:
        raise UsageError(
            'session.step(loss, reduction="batch") cannot be combined with micro_batch or deterministic=True: no '
            "process has the whole batch at a time"
        )
    if weighing.reduction == "sum" and measured:
        raise UsageError(
            "session.step: a loss that is a sum over samples cannot be combined with batch_range, as its gradient "
            "grows with the batch: use the mean"
        )


def _look(loss: torch.Tensor, samples: int, whole: int, *, gathered: bool) -> tuple[Weighing, _Path | None]:
    """Return how a loss is to be weighed, and where in its graph the number of items is, if it is there.

    `whole` is the number of samples of the whole batch, if this process has run only some of them.
    """
    summands = list(_terms(loss.grad_fn, 0 if gathered else samples, whole))
    terms = [term for term in summands if term.kind != "constant"]
    kinds = {term.kind for term in terms}
    if kinds <= {"mean"}:
        return (Weighing("batch", None), None) if gathered else _by_items(terms, samples)
    if gathered:
        raise UsageError(
            "session.step: a sum is part of a loss with session.gather: if the loss is that of the whole batch, the "
            'same in all processes, say so with session.step(loss, reduction="batch")'
        )
    if "mean" in kinds or len(terms) < len(summands):
        raise UsageError(
            "session.step: the loss adds a sum over samples and something that is none, so that its gradient would "
            "depend on how the batch is divided over processes: divide the sum by the number of samples, len(x); or, "
            'if it does not grow with that, say so with session.step(loss, reduction="mean")'
        )
    if kinds == {"loss sum"} and not any(term.times for term in terms):
        return Weighing("sum", None), None
    raise UsageError(
        "session.step: is the loss a sum over the samples, or a mean? Its graph contains a sum: say "
        'session.step(loss, reduction="sum") or reduction="mean", or divide it by the number of samples, len(x)'
    )


def _by_items(terms: list[_Term], samples: int) -> tuple[Weighing, _Path | None]:
    """Return how a sum of means is to be weighed, of which some may be means over tokens or class weights."""
    of_items = [term.node for term in terms if type(term.node).__name__ in _MEANS_OVER_ITEMS]
    weighed = [node for node in of_items if _weighs_items(node, samples)]
    if weighed and (len(terms) > 1 or not _is_readable(weighed[0])):
        raise UsageError(
            "session.step: cross_entropy is a mean over targets or class weights here, not over samples, and only a "
            "part of the loss: say over how many with session.step(loss, items=…), such as "
            'items=(y != ignore_index).sum() or items=weight[y].sum(); or, if samples are to count, reduction="mean"'
        )
    if len(terms) == 1 and of_items and _is_readable(of_items[0]):
        weighing = _items_of(of_items[0])
        # On a CPU they are free: then targets of -100 among one per sample do not count, either.
        if weighed or not isinstance(weighing.items, torch.Tensor):
            return weighing, terms[0].path
    return Weighing("mean", None), None


def _items_of(node: Any) -> Weighing:
    items = node.items if _is_stated(node) else node._saved_total_weight  # noqa: SLF001 - torch has no other way
    return Weighing("mean", items.item() if items.device.type == "cpu" else items.detach())


def _follow(node: Any, path: _Path) -> Any:
    """Return the node at a place; ``None`` if there is none."""
    indices = []
    step: _Path | None = path
    while step is not None:
        indices.append(step.place)
        step = step.before
    for index in reversed(indices[:-1]):  # the last one is that of the end of the graph itself
        inputs = _inputs(node)
        if index >= len(inputs):
            return None
        node = inputs[index]
    return node


def _weighs_items(node: Any, samples: int) -> bool:
    """Return whether a loss may be a mean over another number than that of the samples."""
    if _is_stated(node):
        return bool(node.targets != samples)
    if _has(node, "weight") or node._saved_ignore_index not in (_IGNORED, _IGNORED % _UNSIGNED):  # noqa: SLF001
        return True
    return _is_readable(node) and node._saved_target.numel() != samples  # noqa: SLF001


def _has(node: Any, name: str) -> bool:
    return not _is_unpacked(node, name) or getattr(node, f"_saved_{name}") is not None


def _is_unpacked(node: Any, name: str) -> bool:
    """Return whether a saved tensor can be read: activation checkpointing would compute it again, and only once."""
    return getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) is None


def _is_stated(node: Any) -> bool:
    return type(node).__name__ == MeanOverItems.__name__ + "Backward"


def _is_readable(node: Any) -> bool:
    return _is_stated(node) or (_is_unpacked(node, "target") and _is_unpacked(node, "total_weight"))


def _terms(root: Any, samples: int = 0, whole: int = 0) -> Iterator[_Term]:
    """Yield the summands of a loss.

    Raises
    ------
    UsageError
        A sum is divided by a number that is no multiple of `samples`, if that is given, or by the size of the `whole`
        batch.
    """
    # Node, whether it is summed over afterwards, whether it is multiplied by a constant, where it is.
    nodes = [(root, False, False, _Path(None, 0))]
    for _ in range(_MOST_NODES):
        if not nodes:
            return
        node, summed, times, path = nodes.pop()
        name = type(node).__name__
        children = [(child, _Path(path, index)) for index, child in enumerate(_inputs(node))]
        if name in _PRODUCTS and len(children) > 1:  # a learned weight is no other than a constant one
            children = [(child, place) for child, place in children if not _is_penalty(child)]
        if name in _TERMS or name in SAME_VALUE or (name == "DivBackward0" and _divides_by_one(node)):
            nodes.extend((child, summed, times, place) for child, place in children)
        elif name in _PRODUCTS and len(children) == 1:
            nodes.append((children[0][0], summed, True, children[0][1]))
        elif not summed and name in _ON_PARAMETERS and _is_penalty(node):
            yield _Term("constant", node, times, path)
        elif name == "DivBackward0" and samples and not summed and _divides_a_sum(node, samples):
            raise UsageError(
                "session.step: the loss is a sum that is divided by something else than the number of samples: if it "
                "is a mean over tokens, pixels or weights, say over how many with session.step(loss, items=…), such as "
                'items=mask.sum(); otherwise say reduction="mean" or "sum"'
            )
        elif name == "DivBackward0" and whole and not summed and _divides_by_whole_batch(node, whole):
            raise UsageError(
                f"session.step: the loss is a sum that is divided by {whole}, the samples of the whole batch, of which "
                f"{samples} are here: divide it by the number of samples that the loop has got, len(x); or say that it "
                'is as meant with session.step(loss, reduction="mean")'
            )
        elif name in _SUMS and not summed:
            nodes.extend((child, True, times, place) for child, place in children)
        else:
            yield _Term(_kind(node, name, summed=summed), node, times, path)


def _kind(node: Any, name: str, *, summed: bool) -> _Kind:
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM:
        return "loss sum"
    if not summed or reduction == _MEAN or name == "MeanBackward0":
        return "mean"  # operations that are not known here, too: most losses are means
    if name != "MeanBackward1":
        return "sum"
    first = (0, _UNSIGNED - len(node._saved_self_sym_sizes))  # noqa: SLF001 - torch has no other way
    return "mean" if any(dim in first for dim in node._saved_dim) else "sum"  # noqa: SLF001 - the same


def _divides_by_one(node: Any) -> bool:
    """Return whether a division changes nothing, as in libraries that divide by the number of accumulated batches."""
    return _divisor(node) == 1


def _divides_a_sum(node: Any, samples: int) -> bool:
    """Return whether a sum over samples is divided by what can be no number of samples, nor one of their elements."""
    divisor = _divisor(node)
    if divisor is None or divisor % samples == 0:
        return False
    return any(term.kind in ("sum", "loss sum") for term in _terms(_inputs(node)[0]))


def _divides_by_whole_batch(node: Any, whole: int) -> bool:
    """Return whether a sum is divided by the samples of the whole batch, which are not the elements of the sum."""
    divisor = _divisor(node)
    if divisor is None or divisor % whole:
        return False
    summand = _inputs(node)[0]
    is_sum = any(term.kind in ("sum", "loss sum") for term in _terms(summand))
    return is_sum and divisor not in _summed_elements(summand)


def _summed_elements(root: Any) -> set[float]:
    """Return the numbers of elements of what is summed in the summands of a term."""
    found: set[float] = set()
    nodes = [root]
    while nodes:
        node = nodes.pop()
        name = type(node).__name__
        if name in _TERMS or name in SAME_VALUE or name in _PRODUCTS:
            nodes += _inputs(node)
        elif name in _SUMS:
            found.add(math.prod(node._saved_self_sym_sizes))  # noqa: SLF001 - torch has no other way
        elif getattr(node, "_saved_reduction", None) == _SUM and _is_unpacked(node, "self"):
            found.add(node._saved_self.numel())  # noqa: SLF001 - the same
    return found


def _divisor(node: Any) -> float | None:
    """Return the constant by which a node divides; ``None`` if it is none, or if reading it would wait for a GPU."""
    if len(_inputs(node)) > 1 or not _is_unpacked(node, "other"):
        return None
    other = node._saved_other  # noqa: SLF001 - torch has no other way
    return float(other) if other.device.type == "cpu" and other.numel() == 1 else None


def _inputs(node: Any) -> list[Any]:
    return [] if node is None else [child for child, _ in node.next_functions if child is not None]


def _is_penalty(root: Any) -> bool:
    """Return whether a term depends on parameters alone, such as a penalty on weights, and not on this share's samples.

    Constants may take part, such as earlier weights, but not make it larger than a parameter, as samples do.
    """
    seen, nodes = {root}, [root]
    elements, has_constants = 0, False
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == Shared.__name__ + "Backward":  # over the whole batch: the same on all members
            elements = max(elements, node.elements)
            continue
        if type(node).__name__ not in _ON_PARAMETERS or len(seen) > _MOST_NODES:
            return False
        if type(node).__name__ == "AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):
                return False
            elements = max(elements, node.variable.numel())
        has_constants |= any(child is None for child, _ in node.next_functions)
        fresh = set(_inputs(node)) - seen
        seen |= fresh
        nodes.extend(fresh)
    size = math.prod(getattr(root, "_saved_self_sym_sizes", (math.inf,)))
    return not has_constants or size <= elements


def scalar(loss: object) -> torch.Tensor:
    """Return a loss without dimensions; raises UsageError if it has several elements, or is no tensor."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"one of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"session.step() needs the mean loss, a tensor with one element; got {given}")
    return loss.reshape(()) if loss.dim() else loss


def checked_reduction(reduction: Reduction | None, items: object) -> Reduction | None:
    """Return what a loss is; raises UsageError if it does not exist, or contradicts the items."""
    if reduction not in (None, "mean", "sum", "batch"):
        raise UsageError(f'session.step: reduction must be "mean", "sum" or "batch", got {reduction!r}')
    if reduction in ("sum", "batch") and items is not None:
        raise UsageError(
            f'session.step: items=… says that the loss is a mean, and reduction="{reduction}" that it is not'
        )
    return reduction


def item_count(items: object) -> torch.Tensor | float | None:
    """Return a number of items; one on a GPU is not read. Raises UsageError if it is none."""
    if items is None:
        return None
    if isinstance(items, torch.Tensor) and items.numel() == 1:
        items = items.detach().reshape(())
        if items.is_cuda:
            return items
        items = items.item()
    if isinstance(items, bool) or not isinstance(items, (int, float)) or not 0 <= items < math.inf:
        given = f"a tensor of shape {tuple(items.shape)}" if isinstance(items, torch.Tensor) else repr(items)
        raise UsageError(f"session.step: items must be a number that is not negative, got {given}")
    return items
