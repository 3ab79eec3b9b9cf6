"""What a replay charges and counts: the published accounting, and with starts charged too.

At every instant that changes something (BFTrainer, arXiv 2106.12091, as its public code replays):

- progress grows by time times rate;
- a trainer that lost nodes pays ``down`` seconds at the rate before, once, however many nodes it lost;
- a trainer that is then given other nodes pays at the rate before that change: ``up`` seconds if it got any, else
  ``down`` seconds;
- a trainer without nodes starts for nothing (``paper``), or pays ``start`` seconds at the rate that it then has
  (``full``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import Trainer

__all__ = ["Account", "Losses"]

_ROUNDING = 1e-9  # of a trainer's work


@dataclass
class Losses:
    """Value lost to changes, in units of the objective times seconds."""

    rescale: float = 0.0
    preemption: float = 0.0
    start: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.rescale + self.preemption + self.start


@dataclass
class Account:
    """One trainer's progress.

    Parameters
    ----------
    trainer
        Whose.
    submitted
        When, on the log's clock, seconds.
    weight
        Value of a sample.
    """

    trainer: Trainer
    submitted: float
    weight: float
    nodes: frozenset[str] = frozenset()
    rate: float = 0.0
    samples: float = 0.0
    node_seconds: float = 0.0
    rescales: int = 0
    preemptions: int = 0
    started: float | None = None
    finished: float | None = None

    @property
    def work_left(self) -> float:
        """Samples still to process."""
        return self.trainer.work_left - self.samples

    def done(self, now: float) -> bool:
        """Whether all its work is done, but for what rounding leaves: of the work, or of a clock with large times."""
        if math.isinf(self.trainer.work_left):
            return False
        return self.work_left <= _ROUNDING * self.trainer.work_left or self.done_at(now) <= now

    def done_at(self, now: float) -> float:
        """When it will be done at its rate; infinity if never."""
        if math.isinf(self.trainer.work_left) or self.rate <= 0:
            return math.inf
        return now + max(0.0, self.work_left) / self.rate

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.samples += self.rate * seconds
        self.node_seconds += len(self.nodes) * seconds

    def preempt(self, lost: frozenset[str]) -> float:
        """Take nodes away; return the value that this costs."""
        cost = self._charge(self.trainer.costs.down * self.rate)
        self.preemptions += 1
        self._hold(self.nodes - lost)
        return cost

    def rescale(self, nodes: frozenset[str]) -> float:
        """Give other nodes than before to a trainer that has some; return the value that this costs."""
        costs = self.trainer.costs
        cost = self._charge((costs.up if nodes - self.nodes else costs.down) * self.rate)
        self.rescales += 1
        self._hold(nodes)
        return cost

    def start(self, nodes: frozenset[str], now: float, seconds: float) -> float:
        """Give nodes to a trainer that has none; return the value that `seconds` at its rate cost."""
        if self.started is None:
            self.started = now
        self._hold(nodes)
        return self._charge(seconds * self.rate)

    def stop(self) -> None:
        """Take all nodes from a trainer that is done."""
        self._hold(frozenset())

    def _charge(self, samples: float) -> float:
        self.samples -= samples
        return self.weight * samples

    def _hold(self, nodes: frozenset[str]) -> None:
        self.nodes = nodes
        enough = len(nodes) >= self.trainer.min_nodes
        self.rate = self.trainer.rate(min(len(nodes), self.trainer.max_nodes)) if enough else 0.0
