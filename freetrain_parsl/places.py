"""Names of the units that are allocated: a whole node, or one slot of a node that jobs share."""

from __future__ import annotations

__all__ = ["lane_of", "node_of", "slot_place"]

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
