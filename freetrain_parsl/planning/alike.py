"""Leaves out trainers that wait behind others of their kind: with ten thousand, a decision would take seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

from freetrain_parsl.planning.model import Trainer

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["without_surplus"]

_LEAST_KEPT = 64
"""So many of each kind are always kept: this is fast, and objectives that compare trainers see a fair sample."""

# All that a policy may tell one waiting trainer from another by, but its place in the queue; a mapping has no hash.
_kind = attrgetter(*(field.name for field in fields(Trainer) if field.name not in {"name", "submitted", "curves"}))


def without_surplus(trainers: Iterable[Trainer], running: Container[str], nodes: int) -> list[Trainer]:
    """Return the trainers without those that cannot get a node before others that are alike.

    Parameters
    ----------
    trainers
        In order of submission.
    running
        Names of those that have nodes; they are kept.
    nodes
        Number of nodes: no more than so many trainers of a kind can have some.

    Returns
    -------
    list of Trainer
        All that run, and of those that wait and differ only in name and time of submission the first.
    """
    most, kept = max(nodes, _LEAST_KEPT), []
    seen: Counter[tuple[object, object]] = Counter()
    for trainer in trainers:
        if trainer.name not in running:
            kind = (_kind(trainer), frozenset(trainer.curves.items()))
            seen[kind] += 1
            if seen[kind] > most:
                continue
        kept.append(trainer)
    return kept
