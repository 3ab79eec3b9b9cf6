"""Max-min fairness over counts: who is served, and up to which level everybody can be raised.

Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2), on nodes that cannot be divided, and
a queue with turns where there are more trainers than nodes.
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
        Of the trainer.
    least
        Nodes with which it is served.
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
    """Choose who is served: those within their turn, then who has waited longest, then whose turn is over.

    Nobody who waits is overtaken by another who does, unless it needs more nodes than there are. So when the
    decisions are at most d seconds apart and there are always nodes enough for it, a trainer waits for at most
    ``(k + 1) (turn + d)`` seconds, where k others waited when it began to wait: the turns of all who stand in the
    way of the head of the queue end within one turn, and nobody else begins one before.

    Parameters
    ----------
    claims
        In order of precedence among equals.
    nodes
        Size of the pool.
    now
        Seconds.
    turn
        For how long, in seconds, a trainer that has begun to run is not asked to leave.
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
    """Raise the worst-off by the least number of nodes that helps, as long as there are nodes.

    One whose next step does not fit stays as it is, and the next worst-off is raised. No counts have a higher
    smallest level, whatever the tables; where each step takes one node and gains less than the one before, the
    result is the lexicographic max-min.

    Parameters
    ----------
    tables
        Of each trainer, its level on 0, 1, …, nodes, shape (nodes + 1,); zero where a count is not allowed. Among
        equal levels the earlier is raised first.
    nodes
        To share out.

    Returns
    -------
    list of float
        The level that each reaches.
    """
    # Only counts with a level higher than all smaller counts are steps.
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
