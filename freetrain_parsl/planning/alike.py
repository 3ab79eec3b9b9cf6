"""Leaves out trainers that wait behind others of their kind: with ten thousand, a decision would take seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from freetrain_parsl.planning.model import PlannedJob

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["without_surplus"]

_LEAST_KEPT = 64
"""This number of each kind is always kept: this is fast, and objectives that compare trainers see a fair sample."""

# All that a policy may tell one waiting trainer from another by, but its place in the queue; a mapping has no hash.
_told_apart_by = attrgetter(
    *(field.name for field in fields(PlannedJob) if field.name not in {"name", "submitted", "curves"})
)


class _Kind:
    """Shared by trainers that are alike."""

    __slots__ = ("__weakref__",)


_kinds: WeakValueDictionary[tuple[object, object], _Kind] = WeakValueDictionary()


def _kind_of(trainer: PlannedJob) -> _Kind:
    """Return the kind of a trainer, which stores it: it is needed in each decision while the trainer waits."""
    kind: _Kind | None = trainer.__dict__.get("_kind")  # no field: `replace` makes a trainer without it
    if kind is None:
        told_apart_by = (_told_apart_by(trainer), frozenset(trainer.curves.items()))
        kind = _kinds.get(told_apart_by)
        if kind is None:
            kind = _kinds[told_apart_by] = _Kind()
        trainer.__dict__["_kind"] = kind
    return kind


def without_surplus(trainers: Iterable[PlannedJob], running: Container[str], nodes: int) -> list[PlannedJob]:
    """Return the trainers without those that cannot get a node before others that are alike.

    Parameters
    ----------
    trainers
        In order of submission.
    running
        Names of those that have nodes; they are kept.
    nodes
        Number of nodes: at most this number of trainers of a kind can have any.

    Returns
    -------
    list of PlannedJob
        All that run, and the first of those that wait and differ only in name and time of submission.
    """
    most, kept = max(nodes, _LEAST_KEPT), []
    seen: Counter[_Kind] = Counter()
    for trainer in trainers:
        if trainer.name not in running:
            kind = _kind_of(trainer)
            seen[kind] += 1
            if seen[kind] > most:
                continue
        kept.append(trainer)
    return kept
