"""Training jobs with free rescaling: the oracle of a log, and the same trainers on dedicated nodes.

Both allocate the available nodes at the best total rate at every instant. The oracle does so with the idle nodes of
the log: no policy can exceed it if the trainers are endless. (With trainers that end, the best rate at every instant
need not give the best total; it is still called the oracle here.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from freetrain_parsl.planning.objectives.base import objective_table
from freetrain_parsl.planning.sizes import are_sizes
from freetrain_parsl.planning.solvers.counts import maximise_counts
from freetrain_parsl.planning.solvers.multiple_choice import NOTHING, maximise_choices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from freetrain_parsl.extensions.replay.accounts import Bins
    from freetrain_parsl.extensions.replay.holes import HoleLog
    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.objectives.base import Objective

__all__ = ["BestRates", "Idle", "ideal_value"]


Idle: TypeAlias = tuple[int, ...]
"""Number of idle nodes of each kind."""

_Best: TypeAlias = tuple[float, dict[int, tuple[int, int]]]
_LONGEST_SOLVE = 600.0  # seconds


@dataclass
class BestRates:
    """The best total rate of trainers on a number of nodes, solved exactly and cached.

    Trainers are identified by position; `objective` is the value per second of one on a number of nodes. A trainer runs
    on nodes of one kind at a time. Where trainers share nodes, these numbers are of slots, of which a node has
    `slots_per_node`: all are idle together, so that any sizes that fit in total can be placed.
    """

    trainers: Sequence[PlannedJob]
    objective: Objective
    kinds: Sequence[str] = ("",)
    slots_per_node: int = 1
    _tables: list[list[npt.NDArray[np.float64]]] = field(init=False)
    _known: dict[tuple[frozenset[int], Idle], _Best] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = [
            [self._table(trainer.on_kind(kind) if kind else trainer) for trainer in self.trainers]
            for kind in self.kinds
        ]

    def __call__(self, alive: frozenset[int], idle: Idle) -> float:
        """Return the best total value per second of these trainers on the idle nodes."""
        return self.best(alive, idle)[0]

    def best(self, alive: frozenset[int], idle: Idle) -> _Best:
        """Return the best total value per second, and the kind (its position) and count of each trainer."""
        most = sum(self.trainers[index].max_nodes for index in alive)
        idle = tuple(min(nodes, most) for nodes in idle)
        if (alive, idle) not in self._known:
            rows = sorted(alive)
            solve = self._by_counts if len(self.kinds) == 1 else self._by_choices
            self._known[alive, idle] = solve(rows, idle) if rows else (0.0, {})
        return self._known[alive, idle]

    def speed(self, index: int, kind: int, nodes: int) -> float:
        """Return the samples per second of a trainer."""
        trainer, name = self.trainers[index], self.kinds[kind]
        return (trainer.on_kind(name) if name else trainer).rate(nodes)

    def _by_counts(self, rows: Sequence[int], idle: Idle) -> _Best:
        (nodes,) = idle
        values = np.full((len(rows), nodes + 1), -np.inf)
        for row, index in enumerate(rows):
            table = self._tables[0][index][: nodes + 1]
            values[row, : len(table)] = table
        solution = maximise_counts(values, np.zeros(len(rows), dtype=np.int64), time_limit=math.inf)
        return solution.objective, {row: (0, n) for row, n in zip(rows, solution.counts.tolist(), strict=True)}

    def _by_choices(self, rows: Sequence[int], idle: Idle) -> _Best:
        options = [self._options(index, idle) for index in rows]
        solution = maximise_choices(
            [
                np.array([self._tables[kind][index][n] for kind, n in some])
                for index, some in zip(rows, options, strict=True)
            ],
            [_demands(some, len(idle)) for some in options],
            np.array(idle, dtype=np.float64),
            time_limit=_LONGEST_SOLVE,
        )
        chosen = zip(rows, options, solution.choices.tolist(), strict=True)
        return solution.objective, {row: some[choice] for row, some, choice in chosen if choice != NOTHING}

    def _options(self, index: int, idle: Idle) -> list[tuple[int, int]]:
        """Return the kinds and counts that a trainer may have."""
        trainer = self.trainers[index]
        return [
            (kind, int(count))
            for kind, nodes in enumerate(idle)
            if trainer.may_use(self.kinds[kind])
            for count in np.flatnonzero(np.isfinite(self._tables[kind][index][1 : nodes + 1])) + 1
        ]

    def _table(self, trainer: PlannedJob) -> npt.NDArray[np.float64]:
        table = objective_table(self.objective, trainer, trainer.max_nodes)
        allowed = are_sizes(np.arange(len(table)), self.slots_per_node)
        return np.where(np.isnan(table) | ~allowed, -np.inf, table)


def _demands(options: Sequence[tuple[int, int]], kinds: int) -> npt.NDArray[np.float64]:
    needs = np.zeros((len(options), kinds))
    for row, (kind, count) in enumerate(options):
        needs[row, kind] = count
    return needs


def ideal_value(
    rates: BestRates,
    log: HoleLog,
    *,
    nodes: Idle | None = None,
    concurrent: int | None = None,
    bins: Bins | None = None,
) -> float:
    """Return the value that the trainers reach when rescaling is free.

    Parameters
    ----------
    nodes
        Use this many dedicated nodes of each kind over the same time instead.
    concurrent
        How many trainers may run at a time, first come, first served; ``None`` for all.
    """
    trainers = rates.trainers
    left = [trainer.work_left for trainer in trainers]
    waiting = sorted(range(len(trainers)), key=lambda index: (trainers[index].submitted, index), reverse=True)
    alive: frozenset[int] = frozenset()
    now, value = log.start, 0.0
    for end, idle in _steps(log, rates.kinds, nodes):
        while now < end:
            while waiting and (concurrent is None or len(alive) < concurrent):
                if log.start + trainers[waiting[-1]].submitted > now:
                    break
                alive |= {waiting.pop()}
            rate, chosen = rates.best(alive, idle)
            speeds = {index: rates.speed(index, kind, count) for index, (kind, count) in chosen.items() if count}
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


def _steps(log: HoleLog, kinds: Sequence[str], nodes: Idle | None) -> Iterable[tuple[float, Idle]]:
    """Yield (time, idle nodes until then)."""
    if nodes is not None:
        yield log.end, nodes
        return
    idle = dict.fromkeys(kinds, 0)
    for change in log.changes():
        yield change.time, tuple(idle.values())
        for hole in change.opened:
            idle[log.kinds.get(hole.node, "")] += 1
        for node in change.closed:
            idle[log.kinds.get(node, "")] -= 1
    yield log.end, tuple(idle.values())
