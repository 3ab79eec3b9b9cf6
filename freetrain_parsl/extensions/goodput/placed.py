"""The value of trainers on certain nodes, not only on a number of nodes: hosts in common make a trainer faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.objectives.base import (
    Contextual,
    Moment,
    NetOfChanges,
    Objective,
    Table,
    at_moment,
    value_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.planning.model import Allocation, Pool, Trainer

__all__ = ["PlacedValues", "placement_of"]


def placement_of(nodes: Iterable[str], pool: Pool) -> tuple[int, ...]:
    """Return how many of some nodes are on each host, largest first; machines of their own count as one host."""
    shared = pool.nodes_per_host > 1
    on = Counter((pool[node].host or node) if shared else "" for node in nodes)
    return tuple(sorted(on.values(), reverse=True))


class PlacedValues:
    """Values of trainers by number of nodes on each host, less the costs of changing now.

    On the fewest hosts, a trainer has the value of its number of nodes. On more hosts, its rate is that of
    `Trainer.placed`. A change of hosts at the same number of nodes costs as much as a start.

    Parameters
    ----------
    objective
        Value per second.
    moment
        The situation.
    horizon
        How long the decision is expected to last, seconds.
    """

    def __init__(self, objective: Objective | Contextual, moment: Moment, horizon: float) -> None:
        self._moment, self._horizon = moment, horizon
        self._staying = at_moment(objective, moment)
        self._moving = self._staying
        if isinstance(self._staying, NetOfChanges):
            self._moving = at_moment(objective, replace(moment, held={}))
        self._tables: dict[tuple[int, bool], Table] = {}
        self._spread: dict[tuple[int, tuple[int, ...], bool], float] = {}

    def table(self, number: int, *, moved: bool = False) -> Table:
        """Tabulate the values of a trainer on 0, 1, …, N nodes on the fewest hosts, shape (N + 1,)."""
        key = number, moved
        if key not in self._tables:
            self._tables[key] = self._table(self._moment.trainers[number], moved=moved, last=self._moment.nodes)
        return self._tables[key]

    def value(self, number: int, placement: tuple[int, ...], *, moved: bool) -> float:
        """Return the value of a trainer.

        Parameters
        ----------
        number
            Index of the trainer in the moment.
        placement
            Its nodes on each host, largest first.
        moved
            Whether it has other nodes than now, but as many.
        """
        nodes = sum(placement)
        trainer = self._moment.trainers[number]
        if len(placement) <= 1 or trainer.placed is None:
            return float(self.table(number, moved=moved)[nodes])
        key = number, placement, moved
        if key not in self._spread:
            self._spread[key] = self._value_at(number, nodes, trainer.placed(placement), moved=moved)
        return self._spread[key]

    def total(self, allocation: Allocation, pool: Pool, current: Allocation) -> float:
        """Return the value of an allocation of the pool's nodes."""
        total = 0.0
        for number, trainer in enumerate(self._moment.trainers):
            nodes = allocation.get(trainer.name, frozenset())
            before = current.get(trainer.name, frozenset()) & pool.keys()
            moved = bool(nodes) and nodes != before and len(nodes) == len(before)
            total += self.value(number, placement_of(nodes, pool), moved=moved and pool.nodes_per_host > 1)
        return total

    def _value_at(self, number: int, nodes: int, rate: float, *, moved: bool) -> float:
        trainer = self._moment.trainers[number]
        usual = trainer.rate(nodes)
        if rate == usual:
            return float(self.table(number, moved=moved)[nodes])
        if nodes == trainer.min_nodes:  # the unit of speed-ups, which must stay
            return float(self.table(number, moved=moved)[nodes]) * (rate / usual if usual else 1.0)
        points = dict(trainer.curve.points)
        points[nodes] = rate
        curve = ScalingCurve(sorted(points.items()), relative=trainer.curve.relative)
        return float(self._table(replace(trainer, curve=curve), moved=moved, last=nodes)[nodes])

    def _table(self, trainer: Trainer, *, moved: bool, last: int) -> Table:
        held = 0 if moved else self._moment.held.get(trainer.name, 0)
        return value_table(self._moving if moved else self._staying, trainer, held, last, self._horizon)
