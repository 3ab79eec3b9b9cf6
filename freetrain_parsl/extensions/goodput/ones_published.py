"""ONES as published (SC 2021, arXiv 2108.03645): an evolutionary search for the least remaining node-seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from freetrain_parsl.extensions.goodput.evolution import contiguous_starts, evolve
from freetrain_parsl.planning.policies.base import BaselinePolicy
from freetrain_parsl.settings_checks import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from freetrain_parsl.planning.model import Allocation, PlannedJob, Pool
    from freetrain_parsl.planning.objectives.base import ObjectiveLike

__all__ = ["OnesPublishedPolicy"]

Genes = tuple[int, ...]
"""For each node, the trainer that has it; -1 if none."""

_POPULATION = 16
_EVICTED = 0.3  # probability that a mutation evicts a trainer
_EPOCHS_BEFORE_EVICTION = 2.0
_SMALLEST_SHARE = 1e-6  # of the work that a draw says is done: the score stays finite


class OnesPublishedPolicy(BaselinePolicy):
    """ONES: a population of schedules is refreshed, crossed, mutated, filled and reordered; the best score is used.

    A schedule's score is the sum over its running trainers of ``Y n (1 / rho - 1) / X(n)``, the node-seconds left,
    with Y the samples processed and X the samples per second. The share rho of the work that is done is drawn from a
    Beta distribution of the epochs done and those predicted, once for each trainer and generation. Trainers that wait
    do not count, as published.

    A trainer begins on ``min_nodes``; it may have twice the nodes that it has now, up to ``max_nodes``. It is evicted
    only after two epochs. Idle nodes go to trainers that have never run, then to others in order of their remaining
    time up to these limits, then up to ``max_nodes``.

    Policies keep no state: each decision begins with the current schedule instead of the last population, and the
    limit of a trainer that was evicted is ``min_nodes`` instead of half of what it had. Draws depend on the seed and
    the trainers' progress only.

    Parameters
    ----------
    objective, horizon
        The value model, as in `MilpPolicy`; they do not affect the allocation.
    generations
        Of each decision.
    seed
        Seed of all draws.

    Raises
    ------
    InvalidSettings
        No generations, or a horizon that is not positive.
    """

    name = "ones-published"
    any_layout = True

    def __init__(
        self,
        objective: ObjectiveLike = "speedup",
        *,
        horizon: timedelta | None = None,
        generations: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__(objective, horizon=horizon)
        check_count("policy 'ones-published': generations", generations)
        self._generations, self._seed = generations, seed

    def counts(self, ranked: Sequence[PlannedJob], pool: Pool, current: Allocation) -> Mapping[str, int]:
        """Decide the counts; see `BaselinePolicy.counts`."""
        if not ranked or not len(pool):
            return {}
        owner = {node: number for number, trainer in enumerate(ranked) for node in current.get(trainer.name, ())}
        search = _Search(ranked, tuple(owner.get(node, -1) for node in pool), Random(self._seed))
        best = evolve(
            search.population(),
            search.breed,
            search.score,
            size=_POPULATION,
            generations=self._generations,
            patience=self._generations,
            seed=self._seed,
        )
        counts = np.bincount([gene for gene in best if gene >= 0], minlength=len(ranked))
        return {trainer.name: int(count) for trainer, count in zip(ranked, counts, strict=True) if count}

    def place(self, counts: Mapping[str, int], pool: Pool, current: Allocation) -> Allocation:
        """Choose contiguous nodes with the fewest changes; see `BaselinePolicy.place`."""
        if pool.slots_per_host == 1:
            return super().place(counts, pool, current)
        nodes = list(pool)
        first = {name: min(had) for name in counts if (had := current.get(name, frozenset()) & pool.keys())}
        order = sorted(counts, key=lambda name: (name not in first, first.get(name, name)))
        held = np.array([[node in current.get(name, ()) for node in nodes] for name in order]).reshape(-1, len(nodes))
        starts = contiguous_starts([counts[name] for name in order], held)
        return {name: frozenset(nodes[start : start + counts[name]]) for name, start in zip(order, starts, strict=True)}


@dataclass(frozen=True)
class _Limits:
    """Fewest, usual and most nodes of a trainer."""

    least: int
    usual: int
    most: int


class _Search:
    """Schedules as genes, and the operators on them."""

    def __init__(self, ranked: Sequence[PlannedJob], now: Genes, draw: Random) -> None:
        self._ranked, self._draw = ranked, draw
        self._nodes = len(now)
        held = np.bincount([gene for gene in now if gene >= 0], minlength=len(ranked)).tolist()
        self._limits = [_limits(trainer, had, self._nodes) for trainer, had in zip(ranked, held, strict=True)]
        self._rates = np.stack([np.nan_to_num(trainer.curve.rates(self._nodes)) for trainer in ranked])
        self._left = self._draw_left()
        self._now = self._within_limits(now)

    def population(self) -> list[Genes]:
        """Return the first schedules: the current one, filled, and mutants of it."""
        first = self._filled(self._now)
        return [first, *(self._filled(self._mutated(first)) for _ in range(_POPULATION - 1))]

    def breed(self, population: Sequence[Genes], draw: Random) -> Iterator[Genes]:
        """Yield the children of a generation, whose scores are drawn anew: refreshed, crossed and mutated schedules."""
        self._draw, self._left = draw, self._draw_left()
        for _ in range(len(population) // 2):
            yield self._filled(self._crossed(draw.choice(population), draw.choice(population)))
        for parent in population:
            yield self._filled(self._mutated(parent))

    def score(self, genes: Genes) -> float:
        """Return the negative node-seconds left of the trainers that run."""
        counts = np.bincount([gene for gene in genes if gene >= 0], minlength=len(self._ranked))
        running = np.flatnonzero(counts)
        rates = self._rates[running, counts[running]]
        return -float((self._left[running] * counts[running] / np.maximum(rates, 1e-12)).sum())

    def _draw_left(self) -> npt.NDArray[np.float64]:
        return np.array([_drawn_work(trainer, self._draw) for trainer in self._ranked])

    def _crossed(self, one: Genes, other: Genes) -> Genes:
        """Take each node from either parent."""
        return self._within_limits(
            tuple(a if self._draw.random() < 0.5 else b for a, b in zip(one, other, strict=True))
        )

    def _mutated(self, genes: Genes) -> Genes:
        """Evict trainers from all their nodes."""
        evicted = {
            number
            for number in sorted(set(genes) - {-1})
            if _epochs(self._ranked[number]) >= _EPOCHS_BEFORE_EVICTION and self._draw.random() < _EVICTED
        }
        return tuple(-1 if gene in evicted else gene for gene in genes)

    def _within_limits(self, genes: Genes) -> Genes:
        """Evict trainers with too few nodes, and take those beyond the limits."""
        total = np.bincount([gene for gene in genes if gene >= 0], minlength=len(self._ranked))
        kept = [0] * len(self._ranked)
        result = []
        for gene in genes:
            fits = gene >= 0 and total[gene] >= self._limits[gene].least and kept[gene] < self._limits[gene].usual
            if fits:
                kept[gene] += 1
            result.append(gene if fits else -1)
        return tuple(result)

    def _filled(self, genes: Genes) -> Genes:
        """Give idle nodes away, and reorder: each trainer's nodes are contiguous, in the current order of trainers."""
        counts = np.bincount([gene for gene in genes if gene >= 0], minlength=len(self._ranked)).tolist()
        idle = self._nodes - sum(counts)
        for number in self._order_of_new:
            if not counts[number] and self._limits[number].least <= idle:
                counts[number] = self._limits[number].least
                idle -= counts[number]
        seconds = [
            self._left[number] / max(self._rates[number, max(count, 1)], 1e-12) for number, count in enumerate(counts)
        ]
        for limit in ("usual", "most"):
            for number in sorted(range(len(counts)), key=lambda number: seconds[number]):
                most = self._limits[number].usual if limit == "usual" else self._limits[number].most
                more = min(most - counts[number], idle)
                if more > 0 and counts[number] + more >= self._limits[number].least:
                    counts[number] += more
                    idle -= more
        ordered = [number for number in self._order for _ in range(counts[number])]
        return tuple(ordered + [-1] * (self._nodes - len(ordered)))

    @cached_property
    def _order(self) -> list[int]:
        """Trainers in the order of their current nodes, then those that wait."""
        running = list(dict.fromkeys(gene for gene in self._now if gene >= 0))
        return [*running, *(number for number in range(len(self._ranked)) if number not in set(running))]

    @cached_property
    def _order_of_new(self) -> list[int]:
        return [number for number, trainer in enumerate(self._ranked) if trainer.service == 0]


def _limits(trainer: PlannedJob, held: int, nodes: int) -> _Limits:
    most = min(trainer.max_nodes, nodes)
    return _Limits(trainer.min_nodes, min(max(2 * held, trainer.min_nodes), max(most, trainer.min_nodes)), most)


def _epochs(trainer: PlannedJob) -> float:
    """Return the epochs done; of a trainer that does not count them, enough to be evicted."""
    return math.inf if trainer.epochs is None else trainer.epochs.done


def _drawn_work(trainer: PlannedJob, draw: Random) -> float:
    """Return the samples left as drawn; as known if epochs are not counted; one if nothing is known."""
    if trainer.epochs is None:
        return trainer.work_left if math.isfinite(trainer.work_left) else 1.0
    share = draw.betavariate(max(trainer.epochs.done, 1.0), max(trainer.epochs.left, 1.0))
    return trainer.epochs.samples * (1 / max(share, _SMALLEST_SHARE) - 1)
