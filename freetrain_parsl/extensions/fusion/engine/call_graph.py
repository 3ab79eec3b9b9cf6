"""The autograd graph at the borders of fused calls: inputs are stacked, outputs divided into rows.

A member whose loss does not use an output has no gradient, as alone, where only that output leads to, and its optimizer
leaves the parameter as it is. The gradient of the stacked parameter has zeros in the member's row, by which weight
decay and momentum would act. So a backward pass notes from which rows of outputs it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.forward.loss_items import with_items

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["CallGraph"]


class CallGraph:
    """Connects the graphs of fused calls with those of the members' own code."""

    def __init__(self) -> None:
        self._passed: list[tuple[Any, list[bool]]] | None = None
        # In a backward pass: nodes of outputs that it has passed and, for each row, whether that has a gradient.

    def stack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an argument of all members as one tensor."""
        if not (torch.is_grad_enabled() and any(value.requires_grad for value in values)):
            return torch.stack(list(values))
        stacked: torch.Tensor = _Stack.apply(self, *values)  # type: ignore[no-untyped-call]
        return stacked

    def rows(self, output: torch.Tensor, inputs: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the members' rows of an output of a call with these stacked inputs."""
        if not output.requires_grad:
            return output.unbind(0)
        rows: tuple[torch.Tensor, ...] = _Rows.apply(self, output, {each.grad_fn for each in inputs})  # type: ignore[no-untyped-call]
        return with_items(rows, output)

    def backward(
        self, losses: Sequence[torch.Tensor], rows: Collection[int], *, retain_graph: bool
    ) -> dict[int, set[int]] | None:
        """Compute the gradients of losses of these rows' members.

        Returns
        -------
        dict of int to set of int, or None
            Row -> identities of the leaves that its member's loss depends on through fused calls; ``None`` if they are
            the same for all of these rows.
        """
        self._passed = []
        try:
            torch.autograd.backward(losses, retain_graph=retain_graph)
            if all(used[row] for _, used in self._passed for row in rows):
                return None
            reached: dict[int, set[int]] = {row: set() for row in rows}
            for node, used in self._passed:
                # Only the nodes that accumulate a leaf's gradient have a variable.
                leaves = {id(each.variable) for each in _nodes_before(node) if hasattr(each, "variable")}
                for row in rows:
                    if used[row]:
                        reached[row] |= leaves
            return reached
        finally:
            self._passed = None  # it holds the graph

    def note(self, output: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which rows of an output have a gradient in a backward pass.

        Raises
        ------
        CannotFuse
            It is one of a training job's own that adds gradients to parameters, unlike ``torch.autograd.grad``.
        """
        if self._passed is not None:
            self._passed.append((output, [gradient is not None for gradient in gradients]))
            return
        leaves = (node for node in _nodes_before(output) if hasattr(node, "variable"))
        if any(torch._C._will_engine_execute_node(leaf) for leaf in leaves):
            raise CannotFuse("a training job calls backward() itself instead of session.backward()")

    def uses(self, stacked: Any, rows: int) -> list[bool]:
        """Return which rows of a stacked input the backward pass comes from."""
        passed = [(node, used) for node, used in self._passed or () if stacked in node.inputs]
        if all(all(used) for _, used in passed):
            return [True] * rows
        found = [used for node, used in passed if stacked in _nodes_before(node)]
        return [any(used[row] for used in found) for row in range(rows)]


class _Stack(torch.autograd.Function):
    """As ``torch.stack``, but rows that the loss does not depend on have no gradient, instead of zeros."""

    @staticmethod
    def forward(ctx: Any, graph: CallGraph, *values: torch.Tensor) -> torch.Tensor:
        ctx.graph = graph
        return torch.stack(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = gradient.unbind(0)
        used = ctx.graph.uses(ctx, len(rows))
        return None, *(row if each else None for row, each in zip(rows, used, strict=True))


class _Rows(torch.autograd.Function):
    """As ``output.unbind(0)``; its backward pass notes which rows have a gradient."""

    @staticmethod
    def forward(ctx: Any, graph: CallGraph, output: torch.Tensor, inputs: set[Any]) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.inputs = graph, inputs
        rows = output.unbind(0)
        # Views of one tensor cannot be changed in place, as training loops do with a loss: ``loss *= scale``.
        return tuple(row.clone() for row in rows) if output.dim() == 1 else rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, torch.Tensor | None, None]:
        ctx.graph.note(ctx, gradients)
        known = next((gradient for gradient in gradients if gradient is not None), None)
        if known is None:
            return None, None, None
        return None, torch.stack([torch.zeros_like(known) if each is None else each for each in gradients]), None


def _nodes_before(output: Any) -> set[Any]:
    """Return the nodes of a fused call on which an output depends: leaves and stacked inputs, but none before these."""
    nodes: set[Any] = set()
    waiting = [following for following, _ in output.next_functions]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            if node not in output.inputs:
                waiting.extend(following for following, _ in node.next_functions)
    return nodes
