"""The loop of an evolutionary search: breed, score, keep the best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random
from typing import TypeVar

__all__ = ["evolve"]

Genome = TypeVar("Genome", bound=Hashable)


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
    """Return the best genome found; never worse than the best start.

    Parameters
    ----------
    starts
        The first population, at least one genome.
    breed
        (population, best first, source of randomness) -> children.
    score
        Value of a genome, to be maximised.
    size
        Genomes that survive a generation.
    generations
        How often to breed at most.
    patience
        Stop after so many generations without a better genome.
    seed
        Seed of the randomness: the same arguments have the same result.
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
