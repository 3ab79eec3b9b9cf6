"""The main workload."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True)
class MainJob:
    """A job of the main queue.

    Parameters
    ----------
    submit
        When it is submitted, seconds after the workload's beginning.
    nodes
        How many nodes it needs.
    run
        How long it really runs, seconds.
    walltime
        How long it says that it may run, seconds.
    """

    submit: float
    nodes: int
    run: float
    walltime: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.submit) and self.submit >= 0 and self.nodes >= 1):
            raise InvalidSettings(f"a main job needs a submit time of 0 s or later and a node, got {self!r}")
        if not (math.isfinite(self.run) and self.run >= 0 and 0 < self.walltime < math.inf):
            raise InvalidSettings(f"a main job needs a run time and a positive walltime, got {self!r}")


def save_workload(jobs: Iterable[MainJob], path: Path) -> None:
    """Write a main queue to a file: JSON, one [submit, nodes, run, walltime] a job."""
    rows = [[job.submit, job.nodes, job.run, job.walltime] for job in jobs]
    path.write_text(json.dumps(rows), encoding="utf-8")


def load_workload(path: Path) -> list[MainJob]:
    """Read what `save_workload` wrote.

    Raises
    ------
    InvalidInput
        The file cannot be read or is something else.
    """
    try:
        return [MainJob(*row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"{path} is no saved workload: {error}") from error
