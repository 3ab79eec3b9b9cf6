"""All checkpoints below a directory, for people: what there is, what is intact, what may go."""

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
    """A checkpoint, and what was found out about it.

    Parameters
    ----------
    training
        Its training's name.
    entry
        Which one.
    manifest
        What it tells of itself; empty if it does not.
    problem
        Why it is damaged; empty if it is not, as far as was looked.
    """

    training: str
    entry: Entry
    manifest: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_trainings(place: Path) -> dict[str, CheckpointDirectory]:
    """Return the trainings with checkpoints at a place, by name.

    Parameters
    ----------
    place
        A run directory, a checkpoint directory, or a training's own directory in that.

    Raises
    ------
    InvalidInput
        There are none.
    """
    if not place.is_dir():
        raise InvalidInput(f"{place} is no directory; name a run's directory, or that of its checkpoints")
    place = place.absolute()
    for candidates in ([place], _directories(place / _BELOW_A_RUN), _directories(place)):
        found = {}
        for path in candidates:
            directory = CheckpointDirectory(path.parent, unquote(path.name))
            if directory.path == path and directory.entries():
                found[unquote(path.name)] = directory
        if found:
            return found
    raise InvalidInput(f"there are no checkpoints in {place}; name a run's directory, or that of its checkpoints")


def choose_training(trainings: Mapping[str, CheckpointDirectory], name: str | None) -> dict[str, CheckpointDirectory]:
    """Return the training of that name; all for ``None``.

    Raises
    ------
    InvalidInput
        There is none.
    """
    if name is None:
        return dict(trainings)
    if name not in trainings:
        raise InvalidInput(f"there is no training {name!r} here{did_you_mean(name, trainings)}")
    return {name: trainings[name]}


def list_checkpoints(trainings: Mapping[str, CheckpointDirectory], *, read: bool) -> Iterator[Listed]:
    """Look at all checkpoints, newest of each training first.

    Parameters
    ----------
    trainings
        From `find_trainings`.
    read
        Whether to read all bytes and hold them against their checksums; otherwise only sizes are compared.
    """
    for name, directory in trainings.items():
        for entry in directory.entries():
            yield _look(name, entry, read=read)


def removable(training: str, directory: CheckpointDirectory, keep: int) -> list[Listed]:
    """Return the checkpoints that are older than the `keep` newest intact ones, newest first.

    A damaged one does not count as kept, and stays if there is none intact that is newer.
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
