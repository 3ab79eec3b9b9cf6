"""Estimate from a pool's history how long nodes of unknown closing, and decisions about them, last.

The survival of a node by its age is the piecewise exponential estimate: in each bin of ages, closings over
node-seconds at risk. Nodes that left for a reason other than a closing are censored at that time, as in Kaplan and
Meier (JASA 53, 1958), of whose estimate this is the smoothed form; nodes that are still there are not counted yet. A
few closings at the overall rate are added to each bin, so that a bin without data has the overall rate. Each
`Prospect` has its own survival; a node whose prospect changes is at risk in the old one until then and in the new one
afterwards.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Outlook", "Prospect"]

_EDGES = [0.0, *(2.0 ** (half / 2) for half in range(2, 44))]  # ages, seconds; the last bin begins after a month
_LENGTHS = np.diff(_EDGES)
_PRIOR_CLOSINGS = 2.0  # in each bin, at the overall rate
_FIRST_LIFE = 1200.0  # seconds that a node is assumed to last before any has closed; counts as one closing
_LEAST_STARTS = 6.0  # a start is charged at most a sixth of what its trainer yields within the horizon
_LONGEST_FOR_STARTS = 3600.0  # seconds; a start that takes longer to pay for itself is not worth a node
_FIRST_GAP = 12.0  # seconds assumed between changes of the pool before the first; counts as one change


class Prospect(Enum):
    """The batch system's plan for a node."""

    UNKNOWN = "unknown"
    """No plan is available."""
    UNNEEDED = "unneeded"
    """No job is known to need it."""
    PLANNED = "planned"
    """A job is planned on it."""
    DUE = "due"
    """According to the plan, a job should have it already."""


class _Node(NamedTuple):
    """The time at which a node opened, its prospect, and the time since which it has had that."""

    opened: float
    prospect: Prospect
    seen: float


class Outlook:
    """Learns from nodes that open and close; times in seconds on one clock.

    A time before the latest reported one counts as the latest.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._survivals = {prospect: _Survival() for prospect in Prospect}
        self._first: float | None = None
        self._last = 0.0
        self._changes = 0
        self._closings = 0
        self._node_seconds = 0.0

    def opened(self, time: float, nodes: Iterable[str]) -> None:
        """Record nodes that can be used from now on."""
        time = self._changed(time)
        for node in nodes:
            self._nodes.setdefault(node, _Node(time, Prospect.UNKNOWN, time))

    def seen(self, time: float, node: str, prospect: Prospect) -> None:
        """Record the current prospect of a node; do nothing if it has not opened."""
        time = max(time, self._last)
        if node in self._nodes and self._nodes[node].prospect is not prospect:
            self._leave(time, node, closes=False)
            self._nodes[node] = _Node(self._nodes[node].opened, prospect, time)

    def closed(self, time: float, nodes: Iterable[str], *, given_back: bool = False) -> None:
        """Record nodes that are gone: closed, or released by us, which does not show how long nodes last."""
        time = self._changed(time)
        for node in nodes:
            if node in self._nodes:
                self._leave(time, node, closes=not given_back)
                del self._nodes[node]
                self._closings += not given_back

    def remaining(self, node: str, now: float) -> float:
        """Return the seconds that a node is expected to last; infinity for one that has not opened."""
        known = self._nodes.get(node)
        if known is None:
            return math.inf
        return self._survivals[known.prospect].remaining(max(0.0, now - known.opened), self._life)

    def closing_rate(self, node: str, now: float) -> float:
        """Return the expected closings per second of a node of this age; zero for one that has not opened."""
        known = self._nodes.get(node)
        if known is None:
            return 0.0
        return self._survivals[known.prospect].closing_rate(max(0.0, now - known.opened), self._life)

    def horizon(self, start: float = 0.0) -> float:
        """Return the expected duration of a decision, seconds: the geometric mean of two times, with a minimum.

        One is the time between changes of the pool, each of which leads to a new decision; the other is the lifetime
        of a node. Too short a horizon leaves nodes idle that would have paid for a rescale; too long a horizon pays
        for rescales that the next change undoes.

        The minimum is a multiple of the cost of a start. A decision charges a start in full to its own horizon T, a
        share start / T of the trainer's yield, although the trainer keeps running through many decisions. The multiple
        bounds that share, so that a costly start does not leave nodes to trainers that gain little from more nodes.

        Parameters
        ----------
        start
            Cost of starting a trainer, seconds.
        """
        return max(self._free_horizon, min(_LEAST_STARTS * start, _LONGEST_FOR_STARTS))

    @property
    def _free_horizon(self) -> float:
        """Return the horizon if starts cost nothing."""
        elapsed = 0.0 if self._first is None else self._last - self._first
        gap = (elapsed + _FIRST_GAP) / (self._changes + 1)
        return math.sqrt(gap * self._life)

    @property
    def _life(self) -> float:
        """Return the mean lifetime of a node: node-seconds, including nodes that are still there, over closings."""
        return (self._node_seconds + _FIRST_LIFE) / (self._closings + 1)

    def _changed(self, time: float) -> float:
        """Count a change of the pool and return its time, which is never before the last one."""
        if self._first is None:
            self._first = self._last = time
        time = max(time, self._last)
        self._node_seconds += (time - self._last) * len(self._nodes)
        self._changes += time > self._last
        self._last = time
        return time

    def _leave(self, time: float, node: str, *, closes: bool) -> None:
        known = self._nodes[node]
        time = max(time, known.seen)
        self._survivals[known.prospect].count(known.seen - known.opened, time - known.opened, closes=closes)


class _Survival:
    """Closings and node-seconds at risk in bins of ages; estimates are computed on demand."""

    def __init__(self) -> None:
        self._at_risk = np.zeros(len(_EDGES))
        self._closings = np.zeros(len(_EDGES))
        self._rates: list[float] = []
        self._tails: list[float] = []

    def count(self, young: float, old: float, *, closes: bool) -> None:
        """Record a node at risk from one age to another, at which it closes or is censored."""
        first, last = _bin(young), _bin(old)
        self._at_risk[first:last] += _LENGTHS[first:last]
        self._at_risk[first] -= young - _EDGES[first]
        self._at_risk[last] += old - _EDGES[last]
        self._closings[last] += closes
        self._rates = []

    def remaining(self, age: float, life: float) -> float:
        self._estimate(life)
        index = _bin(age)
        rate = self._rates[index]
        if index + 1 == len(_EDGES):
            return 1.0 / rate
        survives = math.exp(-rate * (_EDGES[index + 1] - age))
        return (1.0 - survives) / rate + survives * self._tails[index + 1]

    def closing_rate(self, age: float, life: float) -> float:
        self._estimate(life)
        return self._rates[_bin(age)]

    def _estimate(self, life: float) -> None:
        """Update the closings per second in each bin and the expected time left at its beginning.

        A bin without data has the overall rate; as long as there is no data at all, nodes are assumed to last `life`.
        """
        if self._rates:
            return
        overall = (float(self._closings.sum()) + 1) / (float(self._at_risk.sum()) + life)
        self._rates = ((self._closings + _PRIOR_CLOSINGS) / (self._at_risk + _PRIOR_CLOSINGS / overall)).tolist()
        tail = 1.0 / self._rates[-1]
        self._tails = [tail]
        for rate, length in zip(self._rates[-2::-1], _LENGTHS[::-1].tolist(), strict=True):
            survives = math.exp(-rate * length)
            tail = (1.0 - survives) / rate + survives * tail
            self._tails.append(tail)
        self._tails.reverse()


def _bin(age: float) -> int:
    return bisect_right(_EDGES, max(0.0, age)) - 1
