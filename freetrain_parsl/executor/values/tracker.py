"""The interface of a tracker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Outcome", "Row", "TrackedTraining", "Tracker", "Value"]

Value: TypeAlias = bool | int | float | str
"""A value of `session.log`."""

Outcome: TypeAlias = Literal["finished", "failed", "cancelled", "interrupted"]
"""How a training ended; an interrupted one goes on later, as after a stop of its campaign."""


@dataclass(frozen=True)
class TrackedTraining:
    """A training, as trackers see it.

    Parameters
    ----------
    name
        Its name.
    id
        The same in all fragments and with all drivers, and of no other training: 16 hexadecimal digits.
    directory
        A directory for the tracker's files about it, the same each time; exists, private to the user.
    """

    name: str
    id: str
    directory: Path


@dataclass(frozen=True)
class Row:
    """The values of one step.

    Parameters
    ----------
    step
        Number of optimizer steps.
    time
        Seconds since the epoch.
    values
        Name -> value.
    """

    step: int
    time: float
    values: Mapping[str, Value]


class Tracker(Protocol):
    """Receives the values of one training; used by one thread. Any exception makes it be closed and opened again later.

    One training has one run in the tracker. What it has of that run it knows best, after a crash, too: so `open` says
    it, and only what is missing follows.

    The class of a registered tracker may state what is checked before a training starts: ``options``, the names of its
    parameters, which are then strings, and ``package``, the package that it imports and what ``pip install`` needs
    for it.
    """

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """Create the training's run, or open the one with its id.

        Returns
        -------
        steps
            The last step of each value that the run has: name -> step.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Add values; for each name, steps rise."""

    def close(self, outcome: Outcome) -> None:
        """Make everything durable and end the run; it may be opened again."""
