"""The position of a training job in its data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

Place = tuple[int, bool, int, int]
"""Epoch, whether all its batches are done, position, steps; later places are greater."""


class Position(NamedTuple):
    """How far a training job is in its data; the same on all its processes.

    Parameters
    ----------
    epoch
        Number of the current epoch, from 0.
    samples
        Samples of this epoch already trained on.
    ended
        Whether this epoch has had all its batches.
    """

    epoch: int
    samples: int
    ended: bool


@dataclass
class Cursor:
    """A position between two steps, see `Position`; the same on all members."""

    epoch: int = 0
    position: int = 0
    pass_ended: bool = False
    steps: int = 0
    """Optimizer steps done on the batch at `position`, if a batch has several."""

    @property
    def place(self) -> Place:
        """The position as a tuple, to compare members."""
        return self.epoch, self.pass_ended, self.position, self.steps

    @property
    def is_inside(self) -> bool:
        """Whether the epoch has begun."""
        return self.position > 0 or self.steps > 0 or self.pass_ended

    def pass_by(self, samples: int) -> None:
        """Advance past a batch."""
        self.position += samples
        self.steps = 0

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self.position, self.pass_ended, self.steps = self.epoch + 1, 0, False, 0

    def leads_to(self, state: Mapping[str, int | bool]) -> bool:
        """Return whether a state is the start of the next epoch."""
        place = state["epoch"], state["pass_ended"], state["position"], state["steps"]
        return place == (self.epoch + 1, False, 0, 0)

    def state(self) -> dict[str, int | bool]:
        """Return the position as plain values."""
        return asdict(self)

    def load(self, state: Mapping[str, int | bool]) -> None:
        """Load a state."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.pass_ended, self.steps = bool(state["pass_ended"]), int(state["steps"])
