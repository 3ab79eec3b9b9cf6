"""What the graph of a loss shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from freetrain_parsl.checking.records import Graph

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

__all__ = ["facts_of", "nodes_of"]

_MOST_NODES = 100_000
_SUM = 2  # torch's number of the reduction "sum"


def nodes_of(loss: torch.Tensor) -> set[Any]:
    """Return the nodes of a loss's graph."""
    nodes: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and len(nodes) < _MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return nodes


def facts_of(nodes: Collection[Any], name_of_foreign: Callable[[torch.Tensor], str | None]) -> Graph:
    """Look at the nodes of a graph.

    Parameters
    ----------
    nodes
        See `nodes_of`.
    name_of_foreign
        Returns the name of a parameter; ``None`` if the session knows it.
    """
    names = [node.name() for node in nodes]
    foreign = set()
    for node in nodes:
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and (name := name_of_foreign(variable)) is not None:
            foreign.add(name)
    return Graph(
        sums=any(getattr(node, "_saved_reduction", None) == _SUM for node in nodes),
        weighted=any(
            name.startswith("NllLoss") and getattr(node, "_saved_weight", None) is not None
            for node, name in zip(nodes, names, strict=True)
        ),
        casts=any(name.startswith("ToCopy") for name in names),
        checkpoint=any("CheckpointFunction" in name for name in names),
        foreign=tuple(sorted(foreign)),
    )
