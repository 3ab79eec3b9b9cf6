"""Costs and progress in a replay: the published accounting, optionally with starts charged too.

At every instant with a change (BFTrainer, arXiv 2106.12091, as in its public replay code):

- progress increases by time times rate;
- a trainer from which nodes are taken pays ``down`` seconds at the previous rate, once for any number of nodes;
- a trainer whose nodes are then changed pays at the rate before that change: ``up`` seconds if it gets any node, else
  ``down`` seconds;
- a trainer without nodes starts at no cost (``paper``), or pays ``start`` seconds at its new rate (``full``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from freetrain_parsl.planning.model import moved_shares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.planning.model import PlannedJob

__all__ = ["Account", "Bins", "Losses"]

_ROUNDING = 1e-9  # of a trainer's work


@dataclass
class Losses:
    """Value lost to changes, in units of the objective times seconds."""

    rescale: float = 0.0
    preemption: float = 0.0
    start: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all losses."""
        return self.rescale + self.preemption + self.start


@dataclass
class Account:
    """One trainer's progress.

    Parameters
    ----------
    submitted
        When it was submitted, on the log's clock, seconds.
    kinds
        Node -> its kind; empty if all nodes are alike. All nodes of a trainer are of one kind.

    Attributes
    ----------
    node_seconds, lost_node_seconds
        Node-seconds that it has held, and of these, that changes have cost.
    seconds_by_kind
        The node-seconds that it has held of each kind of nodes; empty if all are alike.
    """

    trainer: PlannedJob
    submitted: float
    weight: float
    nodes: frozenset[str] = frozenset()
    rate: float = 0.0
    samples: float = 0.0
    node_seconds: float = 0.0
    lost_node_seconds: float = 0.0
    rescales: int = 0
    preemptions: int = 0
    started: float | None = None
    finished: float | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    seconds_by_kind: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _kind: str = ""

    @property
    def work_left(self) -> float:
        """Samples left to process."""
        return self.trainer.work_left - self.samples

    def done(self, now: float) -> bool:
        """Return whether all work is done, up to rounding errors of the work or of a clock with large times."""
        if math.isinf(self.trainer.work_left):
            return False
        return self.work_left <= _ROUNDING * self.trainer.work_left or self.done_at(now) <= now

    def done_at(self, now: float) -> float:
        """Return when it will be done at its current rate; infinity if never."""
        if math.isinf(self.trainer.work_left) or self.rate <= 0:
            return math.inf
        return now + max(0.0, self.work_left) / self.rate

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.samples += self.rate * seconds
        self.node_seconds += len(self.nodes) * seconds
        if self._kind:
            self.seconds_by_kind[self._kind] += len(self.nodes) * seconds

    def preempt(self, lost: frozenset[str]) -> float:
        """Remove nodes; return the value that this costs."""
        cost = self._charge(self._seconds_to(self.nodes - lost) * self.rate)
        self.preemptions += 1
        self._hold(self.nodes - lost)
        return cost

    def rescale(self, nodes: frozenset[str]) -> float:
        """Change the nodes of a running trainer; return the value that this costs."""
        cost = self._charge(self._seconds_to(nodes) * self.rate)
        self.rescales += 1
        self._hold(nodes)
        return cost

    def _seconds_to(self, nodes: frozenset[str]) -> float:
        """Return the seconds that a change of its nodes costs."""
        costs, moved = self.trainer.costs, moved_shares(len(self.nodes), np.array([len(nodes)]))
        change = costs.up if nodes - self.nodes else costs.down
        return change + float(moved[0]) * costs.sharded_bytes / costs.bandwidth

    def start(self, nodes: frozenset[str], now: float, seconds: float) -> float:
        """Give nodes to a trainer without nodes; return the value of `seconds` at its rate, which this costs."""
        if self.started is None:
            self.started = now
        self._hold(nodes)
        return self._charge(seconds * self.rate)

    def stop(self) -> None:
        """Remove all nodes from a finished trainer."""
        self._hold(frozenset())

    def _charge(self, samples: float) -> float:
        self.samples -= samples
        self.lost_node_seconds += len(self.nodes) * samples / self.rate if self.rate > 0 else 0.0
        return self.weight * samples

    def _hold(self, nodes: frozenset[str]) -> None:
        self.nodes = nodes
        enough = len(nodes) >= self.trainer.min_nodes
        self._kind = next((self.kinds.get(node, "") for node in nodes), "")
        here = self.trainer.on_kind(self._kind) if self._kind else self.trainer
        self.rate = here.rate(min(len(nodes), here.max_nodes)) if enough else 0.0


class Bins:
    """Named sums over bins of time, in seconds."""

    def __init__(self, start: float, end: float, number: int = 600) -> None:
        self.start = start
        self.number = number
        self.seconds = (end - start) / number
        self._sums: dict[str, npt.NDArray[np.float64]] = {}

    def add_rate(self, name: str, start: float, end: float, rate: float) -> None:
        """Add `rate` times the seconds from `start` to `end`, distributed over the bins."""
        if end <= start or rate == 0:
            return
        sums = self._of(name)
        first, last = self._bin(start), self._bin(end)
        if first == last:
            sums[first] += rate * (end - start)
            return
        sums[first] += rate * (self.start + (first + 1) * self.seconds - start)
        sums[first + 1 : last] += rate * self.seconds
        sums[last] += rate * (end - self.start - last * self.seconds)

    def add(self, name: str, time: float, amount: float) -> None:
        """Add an amount to the bin that contains `time`."""
        self._of(name)[self._bin(time)] += amount

    def include(self, other: Bins, factor: float) -> None:
        """Add `factor` times the sums of `other`, which must cover the same time with the same number of bins."""
        for name, sums in other._sums.items():
            self._of(name)[:] += factor * sums

    def scale(self, name: str, factor: float) -> None:
        """Multiply the sums of `name`."""
        self._of(name)[:] *= factor

    def sums(self, name: str) -> npt.NDArray[np.float64]:
        """Return the sum in each bin, shape (number,)."""
        return self._sums.get(name, np.zeros(self.number))

    def _of(self, name: str) -> npt.NDArray[np.float64]:
        return self._sums.setdefault(name, np.zeros(self.number))

    def _bin(self, time: float) -> int:
        return min(self.number - 1, max(0, int((time - self.start) / self.seconds)))
