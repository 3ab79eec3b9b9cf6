"""What the past of a pool says about its future: how long nodes of unknown closing last, and decisions with them.

The survival of a node by its age is the piecewise exponential estimate: in each bin of ages, closings over
node-seconds at risk. Nodes that left for another reason than a closing were at risk until then and no more, as in
Kaplan and Meier (JASA 53, 1958), of whose estimate this is the smoothed form; nodes that are still there are not
counted yet. A few closings at the overall rate are added to each bin, so that a bin without data says what all
together say.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Outlook"]

_EDGES = [0.0, *(2.0 ** (half / 2) for half in range(2, 44))]  # ages, seconds; the last bin begins after a month
_PRIOR_CLOSINGS = 2.0  # in each bin, at the overall rate
_FIRST_LIFE = 1200.0  # seconds that a node is taken to last before any has closed; counts as one closing
_FIRST_GAP = 12.0  # seconds between changes of the pool before there were any; counts as one change


class Outlook:
    """Learns from nodes that come and go; times in seconds on one clock."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._at_risk = np.zeros(len(_EDGES))
        self._closings = np.zeros(len(_EDGES))
        self._rates: list[float] = []
        self._tails: list[float] = []
        self._first: float | None = None
        self._last = 0.0
        self._changes = 0
        self._node_seconds = 0.0

    def opened(self, time: float, nodes: Iterable[str]) -> None:
        """Note nodes that can be used from now on."""
        self._changed(time)
        for node in nodes:
            self._since.setdefault(node, time)

    def closed(self, time: float, nodes: Iterable[str], *, given_back: bool = False) -> None:
        """Note nodes that are gone: closed, or given back by us, which says nothing of how long nodes last."""
        self._changed(time)
        for node in nodes:
            if (since := self._since.pop(node, None)) is not None:
                self._count(time - since, closes=not given_back)
        self._rates = []

    def remaining(self, node: str, now: float) -> float:
        """Return the seconds that a node is expected to last; infinity for one that has not opened."""
        if node not in self._since:
            return math.inf
        self._estimate()
        age = now - self._since[node]
        index = _bin(age)
        rate = self._rates[index]
        if index + 1 == len(_EDGES):
            return 1.0 / rate
        survives = math.exp(-rate * (_EDGES[index + 1] - age))
        return (1.0 - survives) / rate + survives * self._tails[index + 1]

    def closing_rate(self, node: str, now: float) -> float:
        """Return the expected closings per second of a node of this age; zero for one that has not opened."""
        if node not in self._since:
            return 0.0
        self._estimate()
        return self._rates[_bin(now - self._since[node])]

    @property
    def horizon(self) -> float:
        """How long a decision is expected to last, seconds: the geometric mean of two times.

        One is the time from one change of the pool to the next, when all is decided anew, the other is the time
        that a node lasts. Too short a horizon lets nodes lie idle that would have paid for a rescale, too long a
        one pays for rescales that the next change undoes.
        """
        elapsed = 0.0 if self._first is None else self._last - self._first
        gap = (elapsed + _FIRST_GAP) / (self._changes + 1)
        return math.sqrt(gap * self._life)

    @property
    def _life(self) -> float:
        """Mean time that a node lasts: node-seconds, of those that are still there too, over closings."""
        return (self._node_seconds + _FIRST_LIFE) / (float(self._closings.sum()) + 1)

    def _changed(self, time: float) -> None:
        if self._first is None:
            self._first = self._last = time
        self._node_seconds += (time - self._last) * len(self._since)
        self._changes += time > self._last
        self._last = time

    def _count(self, age: float, *, closes: bool) -> None:
        last = _bin(age)
        self._at_risk[:last] += np.diff(_EDGES[: last + 1])
        self._at_risk[last] += age - _EDGES[last]
        self._closings[last] += closes

    def _estimate(self) -> None:
        """Bring up to date: closings per second in each bin, and the expected time left at its beginning."""
        if self._rates:
            return
        prior = _PRIOR_CLOSINGS * self._life
        self._rates = ((self._closings + _PRIOR_CLOSINGS) / (self._at_risk + prior)).tolist()
        tail = 1.0 / self._rates[-1]
        self._tails = [tail]
        for rate, length in zip(self._rates[-2::-1], np.diff(_EDGES)[::-1].tolist(), strict=True):
            survives = math.exp(-rate * length)
            tail = (1.0 - survives) / rate + survives * tail
            self._tails.append(tail)
        self._tails.reverse()


def _bin(age: float) -> int:
    return bisect_right(_EDGES, max(0.0, age)) - 1
