"""The settings that all processes of a bare episode share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.chaos.trainings import SUBJECTS, Subject

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BarePlan"]


@dataclass(frozen=True)
class BarePlan:
    """Settings shared by the processes of an episode; times in seconds.

    Parameters
    ----------
    directory
        Directory of the episode.
    checkpoints
        Root of the checkpoints.
    subjects
        The training jobs.
    epochs, samples
        Length of each.
    nodes
        Node names.
    heartbeat_timeout, peer_timeout
        As the executor's.
    """

    directory: Path
    checkpoints: Path
    subjects: tuple[Subject, ...] = SUBJECTS
    epochs: int = 4
    samples: int = 384
    nodes: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    heartbeat_timeout: float = 6.0
    peer_timeout: float = 5.0

    def result_of(self, name: str) -> Path:
        """Return the file to which a training job saves its final state."""
        return self.directory / f"result-{name}.pt"

    def outcome_of(self, name: str) -> Path:
        """Return the file with the outcome of a training job's future."""
        return self.directory / f"outcome-{name}.json"
