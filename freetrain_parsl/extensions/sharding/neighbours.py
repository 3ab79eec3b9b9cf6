"""Where copies of the members' parts go: to members on other nodes, in other batch jobs if possible."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["neighbours"]


def neighbours(nodes: Sequence[Hashable], blocks: Sequence[Hashable]) -> list[int] | None:
    """Return for each rank the one that keeps its copy: each keeps one, and none is on the node of its original.

    Sorted by place, with at most m of n members at one place and 2 m <= n, the member m positions later is always at
    another place: those of one place are less than m positions apart, and less than n - m the other way round.

    Parameters
    ----------
    nodes, blocks
        Of each rank: its node, and the batch job that holds the node. Nodes of one batch job often end together.

    Returns
    -------
    targets
        ``None``: more than half of the members are on one node, so that not all copies can go to another one.
    """
    size = len(nodes)
    for places in (blocks, nodes):
        largest = max(Counter(places).values())
        if 2 * largest <= size:
            first = {place: rank for rank, place in reversed(list(enumerate(places)))}
            order = sorted(range(size), key=lambda rank: (first[places[rank]], rank))
            targets = [0] * size
            for position, rank in enumerate(order):
                targets[rank] = order[(position + largest) % size]
            return targets
    return None
