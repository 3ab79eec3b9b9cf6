"""The settings that all processes of a bare episode share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.chaos.trainings import Subject

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
    slots_per_node
        Number of slots of each; training jobs share nodes that have several.
    part_time
        Those of the nodes that are idle only for `idle` seconds in a row, which is known in advance.
    heartbeat_timeout, peer_timeout
        As the executor's.
    """

    directory: Path
    checkpoints: Path
    subjects: tuple[Subject, ...]
    epochs: int = 4
    samples: int = 384
    nodes: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    slots_per_node: int = 1
    part_time: tuple[str, ...] = ()
    idle: float = 15.0
    heartbeat_timeout: float = 6.0
    peer_timeout: float = 5.0

    def shared(self) -> BarePlan:
        """Return the plan of an episode in which training jobs share nodes."""
        nodes = ("n0", "n1", "n2")
        return replace(
            self,
            epochs=3,
            samples=256,
            nodes=nodes,
            slots_per_node=4,
            part_time=nodes[2:],
        )

    @property
    def claims(self) -> Path:
        """The directory in which processes claim their slots."""
        return self.directory / "claims"

    def pool_of(self, job: str, node: str) -> Path:
        """Return the directory of the worker pool of a batch job on a node."""
        return self.directory / f"pool-{job}-{node}"

    def result_of(self, name: str) -> Path:
        """Return the file to which a training job saves its final state."""
        return self.directory / f"result-{name}.pt"

    def outcome_of(self, name: str) -> Path:
        """Return the file with the outcome of a training job's future."""
        return self.directory / f"outcome-{name}.json"
