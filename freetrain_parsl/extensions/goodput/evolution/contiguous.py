"""The reordering of ONES: every trainer on contiguous nodes, with the fewest changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["contiguous_starts"]


def contiguous_starts(counts: Sequence[int], held: npt.NDArray[np.bool_]) -> list[int]:
    """Return the first node of each trainer, such that together they keep as many of their nodes as possible.

    A dynamic programme over trainers, in the given order, and the nodes used so far.

    Parameters
    ----------
    counts
        Nodes of each trainer, in the order in which they are placed; no more in total than there are.
    held
        Which trainer has which node now, shape (trainers, nodes).
    """
    nodes = held.shape[1]
    kept = np.concatenate([np.zeros((len(counts), 1)), np.cumsum(held, axis=1)], axis=1)
    best = np.zeros(nodes + 1)  # nodes kept by the trainers so far, all on the first 0, 1, ..., N nodes
    ends = []
    for number, count in enumerate(counts):
        here = np.full(nodes + 1, -np.inf)
        here[count:] = best[: nodes + 1 - count] + kept[number, count:] - kept[number, : nodes + 1 - count]
        best = np.maximum.accumulate(here)
        # The last node of this trainer, if all so far are on the first 0, 1, ..., N nodes.
        ends.append(np.maximum.accumulate(np.where(here == best, np.arange(nodes + 1), 0)))
    starts, end = [0] * len(counts), nodes
    for number in range(len(counts) - 1, -1, -1):
        starts[number] = end = int(ends[number][end]) - counts[number]
    return starts
