"""Listing of all checkpoints below a directory: which exist, which are intact, which can be removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from freetrain_parsl.errors import CheckpointError, InvalidInput, did_you_mean
from freetrain_parsl.storage.posix import CheckpointDirectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from freetrain_parsl.storage.entry import Entry

_BELOW_A_RUN = "checkpoints"


@dataclass(frozen=True)
class Listed:
    """A checkpoint and the result of checking it.

    Parameters
    ----------
    training
        Name of its training job.
    entry
        The checkpoint.
    manifest
        Its manifest; empty if it cannot be read.
    problem
        Why it is damaged; empty if the check found no damage.
    """

    training: str
    entry: Entry
    manifest: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_trainings(place: Path) -> dict[str, CheckpointDirectory]:
    """Return the training jobs that have checkpoints at a path, by name.

    Parameters
    ----------
    place
        A run directory, a checkpoint directory, or the directory of one training job in it.

    Raises
    ------
    InvalidInput
        No checkpoints were found.
    """
    if not place.is_dir():
        raise InvalidInput(f"{place} is not a directory; give a run directory or its checkpoint directory")
    place = place.absolute()
    for candidates in ([place], _directories(place / _BELOW_A_RUN), _directories(place)):
        found = {}
        for path in candidates:
            directory = CheckpointDirectory(path.parent, unquote(path.name))
            if directory.path == path and directory.entries():
                found[unquote(path.name)] = directory
        if found:
            return found
    raise InvalidInput(f"there are no checkpoints in {place}; give a run directory or its checkpoint directory")


def choose_training(trainings: Mapping[str, CheckpointDirectory], name: str | None) -> dict[str, CheckpointDirectory]:
    """Return the training job of this name; all training jobs for ``None``.

    Raises
    ------
    InvalidInput
        There is no such training job.
    """
    if name is None:
        return dict(trainings)
    if name not in trainings:
        raise InvalidInput(f"there is no training job {name!r} here{did_you_mean(name, trainings)}")
    return {name: trainings[name]}


def list_checkpoints(trainings: Mapping[str, CheckpointDirectory], *, read: bool) -> Iterator[Listed]:
    """Check all checkpoints, newest of each training job first.

    Parameters
    ----------
    trainings
        From `find_trainings`.
    read
        Whether to read all bytes and compare their checksums; otherwise only file sizes are compared.
    """
    for name, directory in trainings.items():
        for entry in directory.entries():
            yield _look(name, entry, read=read)


def removable(training: str, directory: CheckpointDirectory, keep: int) -> list[Listed]:
    """Return the checkpoints that are older than the `keep` newest intact ones, newest first.

    A damaged checkpoint does not count as kept; it is returned only if `keep` intact ones are newer.
    """
    intact = 0
    older = []
    for entry in directory.entries():
        if intact >= keep:
            older.append(_look(training, entry, read=False))
        else:
            intact += not _look(training, entry, read=True).problem
    return older


def _look(training: str, entry: Entry, *, read: bool) -> Listed:
    manifest: dict[str, Any] = {}
    try:
        manifest = entry.manifest()
        if read:
            entry.verify()
        else:
            entry.check_sizes()
    except CheckpointError as error:
        return Listed(training, entry, manifest, str(error))
    return Listed(training, entry, manifest)


def _directories(path: Path) -> Iterable[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
