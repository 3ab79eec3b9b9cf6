"""The home of checkpoints beyond one site, and which site may train what: the port for drivers of a run.

The nodes write to a file system of their site. A home is where the checkpoints of several sites meet; a training job
may run at a site only while that site owns it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Home", "ResultStatus"]


class ResultStatus(Enum):
    """Whether the result of a finished training job counts."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    LOST = "lost"


class Home(Protocol):
    """The home of a run's training jobs. No method waits for the network; all are called by one thread.

    `freetrain_parsl.testing.home_suite` has the tests that every implementation must pass.
    """

    def want(self, trainings: Iterable[str]) -> None:
        """Get ready to train these, as soon as no other site owns them."""

    def abandon(self, trainings: Iterable[str]) -> None:
        """Release training jobs that are not wanted here, if an earlier driver of this run has not."""

    def leave(self, training: str) -> None:
        """Give up a wanted job that does not run here: its last checkpoint is kept at home, then it is free."""

    def has_left(self, training: str) -> bool:
        """Return whether a training job was never wanted here, or has left and is released."""

    def is_ready(self, training: str) -> bool:
        """Return whether a training job may start, or continue, here."""

    def lost(self, training: str) -> str:
        """Return why a training job that runs here must stop; empty if it need not."""

    def stopped(self, training: str) -> None:
        """Note that a training job whose ownership was lost no longer runs here; it is wanted again."""

    def finished(self, training: str) -> ResultStatus:
        """Note that a job has ended here with a result; return whether the result counts, once that is known."""

    def remark(self, training: str) -> str:
        """Return what the user should know about a training job, such as why it waits; may be empty."""

    def lines(self) -> list[str]:
        """Describe what is under way, such as copies."""

    @property
    def settled(self) -> bool:
        """Whether the last checkpoints of all finished training jobs are at home, or cannot be."""
