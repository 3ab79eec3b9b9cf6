"""What the graph of a loss shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.checking.records import Graph

if TYPE_CHECKING:
    from collections.abc import Collection

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


def facts_of(nodes: Collection[Any]) -> Graph:
    """Look at the nodes of a graph; see `nodes_of`."""
    names = [node.name() for node in nodes]
    return Graph(
        sums=any(getattr(node, "_saved_reduction", None) == _SUM for node in nodes),
        weighted=any(
            name.startswith("NllLoss") and getattr(node, "_saved_weight", None) is not None
            for node, name in zip(nodes, names, strict=True)
        ),
        casts=any(name.startswith("ToCopy") for name in names),
        checkpoint=any("CheckpointFunction" in name for name in names),
    )
