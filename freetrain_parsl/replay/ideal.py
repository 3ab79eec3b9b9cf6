"""Trainings with free rescaling: the oracle of a log, and the same trainers on dedicated nodes.

Both allocate the available nodes at the best total rate at every instant. The oracle does so with the idle nodes of
the log: no policy can exceed it if the trainers are endless. (With trainers that end, the best rate at every instant
need not give the best total; it is still called the oracle here.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.objectives.base import objective_table
from freetrain_parsl.planning.solvers.counts import maximise_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from freetrain_parsl.planning.model import Trainer
    from freetrain_parsl.planning.objectives.base import Objective
    from freetrain_parsl.replay.holes import HoleLog
    from freetrain_parsl.replay.series import Bins

__all__ = ["BestRates", "ideal_value"]


@dataclass
class BestRates:
    """The best total rate of trainers on a number of nodes, solved exactly and cached.

    Parameters
    ----------
    trainers
        All trainers; they are identified by position.
    objective
        Value per second of a trainer on a number of nodes.
    """

    trainers: Sequence[Trainer]
    objective: Objective
    _tables: list[npt.NDArray[np.float64]] = field(init=False)
    _known: dict[tuple[frozenset[int], int], tuple[float, dict[int, int]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        tables = (objective_table(self.objective, trainer, trainer.max_nodes) for trainer in self.trainers)
        self._tables = [np.where(np.isnan(table), -np.inf, table) for table in tables]

    def __call__(self, alive: frozenset[int], nodes: int) -> float:
        """Return the best total value per second of these trainers on `nodes` nodes."""
        return self.best(alive, nodes)[0]

    def best(self, alive: frozenset[int], nodes: int) -> tuple[float, dict[int, int]]:
        """Return the best total value per second and the count of each trainer."""
        nodes = min(nodes, sum(self.trainers[index].max_nodes for index in alive))
        if (alive, nodes) not in self._known:
            rows = sorted(alive)
            values = np.full((len(rows), nodes + 1), -np.inf)
            for row, index in enumerate(rows):
                table = self._tables[index][: nodes + 1]
                values[row, : len(table)] = table
            if rows:
                solution = maximise_counts(values, np.zeros(len(rows), dtype=np.int64), time_limit=math.inf)
                best = solution.objective, dict(zip(rows, solution.counts.tolist(), strict=True))
            else:
                best = 0.0, {}
            self._known[alive, nodes] = best
        return self._known[alive, nodes]


def ideal_value(
    rates: BestRates, log: HoleLog, *, nodes: int | None = None, concurrent: int | None = None, bins: Bins | None = None
) -> float:
    """Return the value that the trainers reach when rescaling is free.

    Parameters
    ----------
    rates
        The trainers and their values.
    log
        The log with the idle nodes.
    nodes
        Use this many dedicated nodes over the same time instead.
    concurrent
        How many trainers may run at a time, first come, first served; ``None`` for all.
    bins
        Where to record the value over time.
    """
    trainers = rates.trainers
    left = [trainer.work_left for trainer in trainers]
    waiting = sorted(range(len(trainers)), key=lambda index: (trainers[index].submitted, index), reverse=True)
    alive: frozenset[int] = frozenset()
    now, value = log.start, 0.0
    for end, idle in _steps(log, nodes):
        while now < end:
            while waiting and (concurrent is None or len(alive) < concurrent):
                if log.start + trainers[waiting[-1]].submitted > now:
                    break
                alive |= {waiting.pop()}
            rate, counts = rates.best(alive, idle)
            speeds = {index: trainers[index].rate(count) for index, count in counts.items() if count}
            until = end
            if waiting and (concurrent is None or len(alive) < concurrent):
                until = min(until, log.start + trainers[waiting[-1]].submitted)
            ends = {index: now + left[index] / speed for index, speed in speeds.items() if speed > 0}
            until = max(now, min(until, min(ends.values(), default=math.inf)))
            value += rate * (until - now)
            if bins is not None:
                bins.add_rate("value", now, until, rate)
            for index, speed in speeds.items():
                left[index] -= speed * (until - now)
            alive -= {index for index, when in ends.items() if when <= until}
            now = until
    return value


def _steps(log: HoleLog, nodes: int | None) -> Iterable[tuple[float, int]]:
    """Yield (time, idle nodes until then)."""
    if nodes is not None:
        yield log.end, nodes
        return
    idle = 0
    for change in log.changes():
        yield change.time, idle
        idle += len(change.opened) - len(change.closed)
    yield log.end, idle
