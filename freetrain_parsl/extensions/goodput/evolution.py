"""The evolutionary search of ONES (SC 2021, section 3.2): layouts of trainers on hosts as genomes, operators, loop.

A gene is a host: the nodes of one host are alike, so a layout says how many of them each trainer has. Crossover takes
each host from either parent, mutation evicts trainers, and the nodes that become free are filled, best gain first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Layout", "LayoutBreeder", "Row", "contiguous_starts", "evolve"]

Row = tuple[tuple[int, int], ...]
"""Nodes of one trainer on each host that it uses: (host, nodes), in order of host."""

Layout = tuple[Row, ...]
"""The row of each trainer; empty if it has no nodes."""

_EVICTED = 0.3  # probability that a mutation evicts a trainer, as published
Genome = TypeVar("Genome", bound=Hashable)


class _Step(NamedTuple):
    """A trainer's change to another row, and the value gained for each node that it takes."""

    gain: float
    trainer: int
    row: Row


@dataclass(frozen=True)
class LayoutBreeder:
    """The operators.

    Parameters
    ----------
    hosts
        Nodes of each host.
    bounds
        Fewest and most nodes of each trainer that runs.
    value
        (trainer, row) -> value; minus infinity for rows that are not allowed.
    """

    hosts: Sequence[int]
    bounds: Sequence[tuple[int, int]]
    value: Callable[[int, Row], float]
    _growth: dict[tuple[int, Row, int], list[_Step]] = field(default_factory=dict, init=False, repr=False)

    def score(self, layout: Layout) -> float:
        """Return the total value."""
        return sum(self.value(trainer, row) for trainer, row in enumerate(layout))

    def breed(self, population: Sequence[Layout], draw: Random) -> Iterator[Layout]:
        """Yield half as many crossovers as there are parents, and a mutant of each parent."""
        for _ in range(len(population) // 2):
            yield self.filled(self.crossed(draw.choice(population), draw.choice(population), draw), draw)
        for parent in population:
            yield self.filled(self.mutated(parent, draw), draw)

    def crossed(self, one: Layout, other: Layout, draw: Random) -> Layout:
        """Take each host from either parent; trainers that are then out of their bounds lose nodes."""
        ones = [draw.random() < 0.5 for _ in self.hosts]
        rows = []
        for trainer, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if mine == theirs:
                rows.append(mine)
                continue
            taken = [pair for pair in mine if ones[pair[0]]] + [pair for pair in theirs if not ones[pair[0]]]
            rows.append(self._within_bounds(trainer, taken))
        return tuple(rows)

    def mutated(self, layout: Layout, draw: Random) -> Layout:
        """Evict trainers; at least one if any runs."""
        running = [trainer for trainer, row in enumerate(layout) if row]
        evicted = {trainer for trainer in running if draw.random() < _EVICTED}
        if running and not evicted:
            evicted = {draw.choice(running)}
        return tuple(() if trainer in evicted else row for trainer, row in enumerate(layout))

    def filled(self, layout: Layout, draw: Random) -> Layout:
        """Give free nodes to the trainers that gain most for each, host by host in random order."""
        rows = list(layout)
        free = self.free(rows)
        order = [host for host, nodes in enumerate(free) if nodes]
        draw.shuffle(order)
        for host in order:
            while free[host]:
                step = max(self._steps(rows, free, host), default=None)
                if step is None or step.gain <= 0:
                    break
                for at, nodes in rows[step.trainer]:
                    free[at] += nodes
                rows[step.trainer] = step.row
                for at, nodes in step.row:
                    free[at] -= nodes
        return tuple(rows)

    def free(self, rows: Iterable[Row]) -> list[int]:
        """Return the free nodes of each host."""
        free = list(self.hosts)
        for row in rows:
            for host, nodes in row:
                free[host] -= nodes
        return free

    def _steps(self, rows: Sequence[Row], free: Sequence[int], host: int) -> Iterator[_Step]:
        """Yield the best way of each trainer to use free nodes of a host, and others if one that waits needs them."""
        for trainer, row in enumerate(rows):
            least, most = self.bounds[trainer]
            if row or least <= free[host]:
                key = trainer, row, host
                if key not in self._growth:
                    self._growth[key] = self._best_growths(trainer, row, host, most)
                growths = self._growth[key]
                if growths and (step := growths[min(free[host], len(growths)) - 1]).gain > 0:
                    yield step
            elif least <= most:
                after = self._topped_up(_with(row, host, free[host]), free, host, least - free[host])
                if after:
                    yield _Step((self.value(trainer, after) - self.value(trainer, row)) / least, trainer, after)

    def _best_growths(self, trainer: int, row: Row, host: int, most: int) -> list[_Step]:
        """Return the best growth of a trainer on a host by at most 1, 2, ... nodes; empty if it is at its maximum."""
        had, now = sum(nodes for _, nodes in row), self.value(trainer, row)
        least = self.bounds[trainer][0]
        best: list[_Step] = []
        for more in range(1, min(self.hosts[host], most - had) + 1):
            after = _with(row, host, more)
            gain = (self.value(trainer, after) - now) / more if had + more >= least else -math.inf
            step = _Step(gain, trainer, after)
            best.append(max(step, best[-1]) if best else step)
        return best

    @staticmethod
    def _topped_up(row: Row, free: Sequence[int], host: int, missing: int) -> Row:
        """Add the nodes that are missing from other hosts, emptiest first; return nothing if there are too few."""
        for other in sorted((at for at in range(len(free)) if at != host), key=lambda at: -free[at]):
            if share := min(free[other], missing):
                row = _with(row, other, share)
                missing -= share
        return () if missing else row

    def _within_bounds(self, trainer: int, pairs: Iterable[tuple[int, int]]) -> Row:
        least, most = self.bounds[trainer]
        kept: dict[int, int] = {}
        for host, nodes in sorted(pairs, key=lambda pair: -pair[1]):
            if share := min(nodes, most):
                kept[host] = share
                most -= share
        row = _row(kept)
        return row if sum(kept.values()) >= least and math.isfinite(self.value(trainer, row)) else ()


def _with(row: Row, host: int, nodes: int) -> Row:
    kept = dict(row)
    kept[host] = kept.get(host, 0) + nodes
    return _row(kept)


def _row(nodes: Mapping[int, int]) -> Row:
    return tuple(sorted(nodes.items()))


def evolve(
    starts: Iterable[Genome],
    breed: Callable[[Sequence[Genome], Random], Iterable[Genome]],
    score: Callable[[Genome], float],
    *,
    size: int,
    generations: int,
    patience: int,
    seed: int,
) -> Genome:
    """Return the best genome found; never worse than the best start, and the same for the same arguments.

    `breed` makes children of a population, best first, and a source of randomness. `size` genomes survive a generation;
    it ends after so many generations, or `patience` of them without a better genome.
    """
    draw = Random(seed)
    population = _fittest(starts, score, size)
    best, stale = score(population[0]), 0
    for _ in range(generations):
        population = _fittest([*population, *breed(population, draw)], score, size)
        reached = score(population[0])
        stale = 0 if reached > best else stale + 1
        best = reached
        if stale >= patience:
            break
    return population[0]


def _fittest(genomes: Iterable[Genome], score: Callable[[Genome], float], size: int) -> list[Genome]:
    """Return the best distinct genomes, best first; among equals, the earlier ones."""
    return sorted(dict.fromkeys(genomes), key=score, reverse=True)[:size]


def contiguous_starts(counts: Sequence[int], held: npt.NDArray[np.bool_]) -> list[int]:
    """Return the first node of each trainer, such that together they keep as many of their nodes as possible.

    A dynamic programme over trainers, in the order in which they are placed, and the nodes used so far. `held` says
    which trainer has which node now, shape (trainers, nodes).
    """
    nodes = held.shape[1]
    kept = np.concatenate([np.zeros((len(counts), 1)), np.cumsum(held, axis=1)], axis=1)
    best = np.zeros(nodes + 1)  # nodes kept by the trainers so far, all on the first 0, 1, ..., N nodes
    ends = []
    for number, count in enumerate(counts):
        here = np.full(nodes + 1, -np.inf)
        here[count:] = best[: nodes + 1 - count] + kept[number, count:] - kept[number, : nodes + 1 - count]
        best = np.maximum.accumulate(here)
        # The last node of this trainer, if all so far are on the first 0, 1, ..., N nodes.
        ends.append(np.maximum.accumulate(np.where(here == best, np.arange(nodes + 1), 0)))
    starts, end = [0] * len(counts), nodes
    for number in range(len(counts) - 1, -1, -1):
        starts[number] = end = int(ends[number][end]) - counts[number]
    return starts
