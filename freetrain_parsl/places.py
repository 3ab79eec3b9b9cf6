"""Names of the units that are allocated: a whole node, or one slot of a node that jobs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["count_places", "lane_of", "lanes_by_node", "node_of", "slot_place", "slots_of"]

_SEPARATOR = "/"  # in no node name of a batch system


def slot_place(node: str, lane: int) -> str:
    """Return the name of one slot of a node: ``n0/2``; lanes are numbered from 0."""
    return f"{node}{_SEPARATOR}{lane}"


def node_of(place: str) -> str:
    """Return the node of a unit: ``n0`` for ``n0/2`` and for ``n0``."""
    return place.partition(_SEPARATOR)[0]


def lane_of(place: str) -> int | None:
    """Return the lane of a slot on its node; ``None`` for a whole node."""
    lane = place.partition(_SEPARATOR)[2]
    return int(lane) if lane else None


def slots_of(place: str, slots_per_node: int) -> list[str]:
    """Return the units of a node that jobs share, or of a slot: itself; 1 slot: jobs have whole nodes."""
    if slots_per_node == 1 or lane_of(place) is not None:
        return [place]
    return [slot_place(place, lane) for lane in range(slots_per_node)]


def lanes_by_node(places: Collection[str]) -> dict[str, list[tuple[int, int]]]:
    """Return node -> its lanes among these units, as (first, number) of each run; no run for a whole node."""
    runs: dict[str, list[tuple[int, int]]] = {node_of(place): [] for place in places}
    for node, lane in sorted((node_of(place), lane) for place in places if (lane := lane_of(place)) is not None):
        first, number = runs[node][-1] if runs[node] else (lane, 0)
        if lane == first + number:
            runs[node][-1:] = [(first, number + 1)]
        else:
            runs[node].append((lane, 1))
    return runs


def count_places(places: Collection[str]) -> str:
    """Say how much a job has: ``3 nodes``, ``2 accelerators on n0``, or ``2 nodes (8 accelerators)``."""
    nodes = {node_of(place) for place in places}
    slots = sum(lane_of(place) is not None for place in places)
    if not slots:
        return _count(len(nodes), "node")
    accelerators = _count(slots, "accelerator")
    return f"{accelerators} on {min(nodes)}" if len(nodes) == 1 else f"{_count(len(nodes), 'node')} ({accelerators})"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
