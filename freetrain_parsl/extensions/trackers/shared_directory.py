"""Names in a directory that the trackers of several trainings share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.executor.values.tracker import TrackedTraining

__all__ = ["name_in"]


def name_in(directory: Path, training: TrackedTraining) -> str:
    """Return a training's name in a directory, with its id if the name belongs to another training there.

    This other one may be of another campaign, or the same one before it started over with other code.
    """
    owner = directory / f".{training.name}.id"
    try:
        with os.fdopen(os.open(owner, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(training.id)
    except FileExistsError:
        if owner.read_text(encoding="ascii", errors="replace") != training.id:
            return f"{training.name}-{training.id}"
    return training.name
