"""The number of items of a loss that is computed inside a fused model.

The session weighs a loss by the items that it is a mean over, such as the tokens that count, and reads their number in
the graph of the loss. A fused loss is computed by other operations, and a member's graph has only the
call of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.training.step.loss_kind import SAME_VALUE, MeanOverItems

if TYPE_CHECKING:
    import torch

__all__ = ["note_items", "with_items"]

_KEY = "freetrain items"
_IGNORED = -100  # torch's default


def note_items(losses: torch.Tensor, items: torch.Tensor, targets: int, ignored: int, *, has_weights: bool) -> None:
    """Note that each member's loss is a mean over a number of items.

    Parameters
    ----------
    losses, items
        Of all members, shape [B].
    targets
        Number of targets of each member.
    ignored
        The target that does not count.
    has_weights
        Whether the items are weighed by their classes.
    """
    node: Any = losses.grad_fn
    if node is not None:
        node.metadata[_KEY] = items, targets, ignored, has_weights


def with_items(rows: tuple[torch.Tensor, ...], losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the members' losses with the number of items in their graphs, if it was noted for all losses."""
    node: Any = losses.grad_fn if losses.dim() == 1 else None
    while node is not None and type(node).__name__ in SAME_VALUE and _KEY not in node.metadata:
        node = node.next_functions[0][0]
    if node is None or _KEY not in node.metadata:
        return rows
    items, targets, ignored, has_weights = node.metadata[_KEY]
    stated = targets if not has_weights and ignored == _IGNORED else 0  # 0 is never the number of samples
    return tuple(
        MeanOverItems.apply(row, each, stated)  # type: ignore[no-untyped-call]
        for row, each in zip(rows, items, strict=True)
    )
