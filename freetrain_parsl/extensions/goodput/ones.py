"""The operators of ONES (SC 2021) on any objective: a search where the exact model proves nothing in time."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.goodput.evolution import Layout, LayoutBreeder, Row, evolve
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool
from freetrain_parsl.planning.objectives.base import (
    Contextual,
    Moment,
    Objective,
    ObjectiveLike,
    Table,
    at_moment,
    resolve_objective,
    value_table,
)
from freetrain_parsl.planning.placement import current_counts, place
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.policies.milp import MilpPolicy, move_cost
from freetrain_parsl.planning.sizes import round_down
from freetrain_parsl.planning.solvers.highs import is_proven
from freetrain_parsl.settings_checks import check_count, check_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["OnesPolicy", "PlacedValues", "placement_of"]


def placement_of(nodes: Iterable[str], pool: Pool) -> tuple[int, ...]:
    """Return how many of some nodes are on each host, largest first; machines of their own count as one host."""
    shared = pool.slots_per_host > 1
    on = Counter(pool[node].machine if shared else "" for node in nodes)
    return tuple(sorted(on.values(), reverse=True))


class PlacedValues:
    """Values of trainers by number of nodes on each host, less the costs of changing now.

    On the fewest hosts, a trainer has the value of its number of nodes. On more hosts, its rate is that of
    `PlannedJob.placed`. A change of hosts at the same number of nodes costs what `move_cost` says.

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
        self._objective = at_moment(objective, moment)
        self._tables: dict[int, Table] = {}
        self._spread: dict[tuple[int, tuple[int, ...]], float] = {}

    def table(self, number: int) -> Table:
        """Tabulate the values of a trainer on 0, 1, …, N nodes on the fewest hosts, shape (N + 1,)."""
        if number not in self._tables:
            self._tables[number] = self._table(self._moment.trainers[number], self._moment.nodes)
        return self._tables[number]

    def value(self, number: int, placement: tuple[int, ...], *, moved: bool) -> float:
        """Return the value of a trainer with so many nodes on each host, largest first.

        `moved`: it has other nodes than now, but as many.
        """
        nodes = sum(placement)
        trainer = self._moment.trainers[number]
        cost = move_cost(trainer, nodes, self._objective) if moved else 0.0
        if len(placement) <= 1 or trainer.placed is None:
            return float(self.table(number)[nodes]) - cost
        key = number, placement
        if key not in self._spread:
            self._spread[key] = self._value_at(number, nodes, trainer.placed(placement))
        return self._spread[key] - cost

    def total(self, allocation: Allocation, pool: Pool, current: Allocation) -> float:
        """Return the value of an allocation of the pool's nodes."""
        total = 0.0
        for number, trainer in enumerate(self._moment.trainers):
            nodes = allocation.get(trainer.name, frozenset())
            before = current.get(trainer.name, frozenset()) & pool.keys()
            moved = bool(nodes) and nodes != before and len(nodes) == len(before)
            total += self.value(number, placement_of(nodes, pool), moved=moved and pool.slots_per_host > 1)
        return total

    def _value_at(self, number: int, nodes: int, rate: float) -> float:
        trainer = self._moment.trainers[number]
        usual = trainer.rate(nodes)
        if rate == usual:
            return float(self.table(number)[nodes])
        if nodes == trainer.min_nodes:  # the unit of speed-ups, which must stay
            return float(self.table(number)[nodes]) * (rate / usual if usual else 1.0)
        points = dict(trainer.curve.points)
        points[nodes] = rate
        curve = ScalingCurve(sorted(points.items()), relative=trainer.curve.relative)
        return float(self._table(replace(trainer, curve=curve), nodes)[nodes])

    def _table(self, trainer: PlannedJob, last: int) -> Table:
        held = self._moment.held.get(trainer.name, 0)
        return value_table(self._objective, trainer, held, last, self._horizon)


class OnesPolicy(Policy):
    """Evolves layouts of trainers on hosts, beginning with the optimum of `MilpPolicy`.

    If that is proven, as it nearly always is, there is nothing to find: where nodes are machines of their own, and
    where trainers share hosts in the sizes of `planning.sizes`, their values depend on their numbers of nodes and on
    moves only, which the exact model has. Otherwise its best allocation and the current one are the first population of
    an evolutionary search, with the operators of ONES: the result is never worth less than either.

    Parameters
    ----------
    objective, horizon
        As in `MilpPolicy`.
    population
        Layouts that survive a generation. ONES has 16; with fewer, more generations take as long and find more.
    generations
        Most generations of a decision; zero for the best of the first population.
    patience
        Stop after so many generations without a better layout.
    warm_start
        Whether the exact optimum is in the first population; without, the search shows what it finds on its own.
    seed
        Seed of the search.
    time_limit
        Of the exact model, as in `MilpPolicy`.
    """

    name = "ones"

    def __init__(
        self,
        objective: ObjectiveLike = "speedup",
        *,
        horizon: timedelta | None = None,
        population: int = 8,
        generations: int = 30,
        patience: int = 8,
        warm_start: bool = True,
        seed: int = 0,
        time_limit: timedelta = timedelta(seconds=1),
    ) -> None:
        if horizon is not None:
            check_duration("policy 'ones': horizon", horizon)
        check_count("policy 'ones': population", population, least=2)  # parents of a crossover
        check_count("policy 'ones': generations", generations, least=0)
        check_count("policy 'ones': patience", patience)
        self._objective = resolve_objective(objective)
        self._horizon = None if horizon is None else horizon.total_seconds()
        self._population, self._generations, self._patience = population, generations, patience
        self._warm_start, self._seed = warm_start, seed
        self._exact = MilpPolicy(objective, horizon=horizon, time_limit=time_limit)

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        """Decide the allocation; see `Policy.allocate`."""
        started = time.perf_counter()
        ranked = sorted(trainers, key=lambda trainer: (trainer.submitted, trainer.name))
        if not ranked or not len(pool):
            return Decision({}, 0.0, proven_optimal=True, bound=0.0)
        moment = Moment(ranked, current_counts(ranked, pool, current), len(pool), now)
        problem = _Problem(pool, current, moment, PlacedValues(self._objective, moment, self._horizon or pool.horizon))
        exact = self._exact.allocate(pool, ranked, current, now)
        starts = [problem.current]
        if self._warm_start:
            if exact.proven_optimal:
                return exact
            starts.append(problem.layout(exact.allocation))
        best = max(starts, key=problem.breeder.score)
        bound = exact.bound
        if not is_proven(problem.breeder.score(best), bound):
            best = evolve(
                starts,
                problem.breeder.breed,
                problem.breeder.score,
                size=self._population,
                generations=self._generations,
                patience=self._patience,
                seed=self._seed,
            )
        value = problem.breeder.score(best)
        return Decision(
            problem.allocation(best),
            value,
            proven_optimal=is_proven(value, bound),
            bound=max(bound, value),
            solve_seconds=time.perf_counter() - started,
        )


class _Problem:
    """One decision, as the search sees it: hosts and trainers are numbers.

    A pool whose nodes are machines of their own is one host: its nodes are alike.
    """

    def __init__(self, pool: Pool, current: Allocation, moment: Moment, values: PlacedValues) -> None:
        self._pool, self._current, self._moment, self._values = pool, current, moment, values
        self._shared = pool.slots_per_host > 1
        hosts = {name: node.machine if self._shared else "" for name, node in pool.items()}
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts.values()))}
        self._host_of = {name: numbers[host] for name, host in hosts.items()}
        sizes = [0] * len(numbers)
        for number in self._host_of.values():
            sizes[number] += 1
        self._now = self.layout(current)
        self._held = [_nodes(row) for row in self._now]
        self._known: dict[tuple[int, Row], float] = {}
        bounds = [(trainer.min_nodes, min(trainer.max_nodes, len(pool))) for trainer in moment.trainers]
        self.breeder = LayoutBreeder(sizes, bounds, self._value)

    @property
    def current(self) -> Layout:
        """The current layout, without trainers that cannot go on as they are."""
        return tuple(row if math.isfinite(self._value(number, row)) else () for number, row in enumerate(self._now))

    def allocation(self, layout: Layout) -> Allocation:
        """Choose the nodes: trainers keep those that they have on a host."""
        if not self._shared:
            counts = {self._moment.trainers[number].name: _nodes(row) for number, row in enumerate(layout)}
            return place(counts, self._pool, self._current)
        chosen: dict[str, list[str]] = {}
        wanted: dict[str, dict[int, int]] = {}
        taken: set[str] = set()
        for trainer, row in zip(self._moment.trainers, layout, strict=True):
            wanted[trainer.name] = dict(row)
            for node in sorted(self._current.get(trainer.name, ())):
                host = self._host_of.get(node, -1)
                if wanted[trainer.name].get(host, 0):
                    wanted[trainer.name][host] -= 1
                    chosen.setdefault(trainer.name, []).append(node)
                    taken.add(node)
        free: dict[int, list[str]] = {}
        for node in reversed(list(self._pool)):
            if node not in taken:
                free.setdefault(self._host_of[node], []).append(node)
        for name, missing in wanted.items():
            for host, nodes in missing.items():
                chosen.setdefault(name, []).extend(free[host].pop() for _ in range(nodes))
        return {name: frozenset(nodes) for name, nodes in chosen.items() if nodes}

    def layout(self, allocation: Allocation) -> Layout:
        """Return the layout of an allocation, without nodes that have left the pool."""
        rows = []
        for trainer in self._moment.trainers:
            on: dict[int, int] = {}
            for node in allocation.get(trainer.name, ()):
                if node in self._host_of:
                    on[self._host_of[node]] = on.get(self._host_of[node], 0) + 1
            rows.append(tuple(sorted(on.items())))
        return tuple(rows)

    def _value(self, number: int, row: Row) -> float:
        key = number, row
        if key not in self._known:
            placement = tuple(sorted((nodes for _, nodes in row), reverse=True))
            moved = self._shared and bool(row) and row != self._now[number] and sum(placement) == self._held[number]
            allowed = not self._shared or _are_parts(placement, self._pool.slots_per_host)
            self._known[key] = self._values.value(number, placement, moved=moved) if allowed else -math.inf
        return self._known[key]


def _are_parts(placement: tuple[int, ...], slots: int) -> bool:
    """Return whether these slots on each host are none, part of one host, of a size, or whole hosts."""
    if len(placement) > 1 or sum(placement) > slots:
        return set(placement) == {slots}
    return round_down(sum(placement), slots) == sum(placement)


def _nodes(row: Row) -> int:
    return sum(nodes for _, nodes in row)
