"""Max-min fairness over counts: which trainers are served, and the level that each can reach.

Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2) with indivisible nodes, and a queue
with turns if there are more trainers than nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Claim", "fair_levels", "seated"]

Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Claim:
    """A trainer in the queue.

    Parameters
    ----------
    name
        Name of the trainer.
    least
        Minimum number of nodes.
    since
        When it began to wait, or to run, seconds.
    running
        Whether it has nodes.
    """

    name: str
    least: int
    since: float
    running: bool


def seated(claims: Iterable[Claim], nodes: int, now: float, turn: float) -> set[str]:
    """Choose the trainers to serve: those within their turn, then the longest-waiting, then those past their turn.

    No waiting trainer is overtaken by another waiting one unless it needs more nodes than there are. If decisions are
    at most d seconds apart and there are always enough nodes for it, a trainer therefore waits for at most
    ``(k + 1) (turn + d)`` seconds, where k others were waiting when it began to wait: all turns that block the head of
    the queue end within one turn, and no other trainer begins one before.

    Parameters
    ----------
    claims
        In order of precedence among equals.
    nodes
        Size of the pool.
    now
        Seconds.
    turn
        How long a trainer that has started is not stopped, seconds.
    """
    order = sorted(claims, key=lambda claim: _precedence(claim, now, turn))
    chosen: set[str] = set()
    left, overtaking = nodes, False
    for claim in order:
        if claim.least > nodes or (overtaking and not claim.running):
            continue
        if claim.least <= left:
            chosen.add(claim.name)
            left -= claim.least
        elif not claim.running:
            overtaking = True
    return chosen


def _precedence(claim: Claim, now: float, turn: float) -> tuple[int, float]:
    if not claim.running:
        return 1, claim.since
    return (0, claim.since) if now - claim.since < turn else (2, -claim.since)


def fair_levels(tables: Sequence[Table], nodes: int) -> list[float]:
    """Raise the worst-off trainer by the minimum number of nodes that helps, as long as there are nodes.

    A trainer whose next step does not fit keeps its level, and the next worst-off is raised. No counts have a higher
    smallest level, for any tables; if each step takes one node and gains less than the one before, the result is the
    lexicographic max-min.

    Parameters
    ----------
    tables
        Level of each trainer on 0, 1, …, nodes, shape (nodes + 1,); zero where a count is not allowed. Among equal
        levels, the earlier trainer is raised first.
    nodes
        Number of nodes to allocate.

    Returns
    -------
    list of float
        The level that each trainer reaches.
    """
    # Only counts with a level higher than that of all smaller counts are steps.
    steps = [np.flatnonzero(table[1:] > np.maximum.accumulate(table)[:-1]) + 1 for table in tables]
    reached = [0.0] * len(tables)
    taken = [0] * len(tables)
    waiting = [(0.0, row, 0) for row, counts in enumerate(steps) if len(counts)]
    heapify(waiting)
    left = nodes
    while waiting:
        _, row, step = heappop(waiting)
        count = int(steps[row][step])
        if count - taken[row] > left:
            continue
        left -= count - taken[row]
        taken[row], reached[row] = count, float(tables[row][count])
        if step + 1 < len(steps[row]):
            heappush(waiting, (reached[row], row, step + 1))
    return reached
