"""Files of the user that nodes read from copies on their own storage: a port for an extension, which makes them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.errors import InvalidApp, UsageError
from freetrain_parsl.protocol.options import StagedPath

if TYPE_CHECKING:
    from freetrain_parsl.protocol.options import SessionOptions

__all__ = ["COPIES", "LocalCopies", "described", "local_path", "paths_of"]


class LocalCopies(ABC):
    """Makes copies of files on the storage of the node that this process runs on."""

    @classmethod
    @abstractmethod
    def describe(cls, path: StagedPath) -> StagedPath:
        """Return a path with what identifies its content, when its training job is submitted.

        Raises
        ------
        InvalidApp
            It does not exist, cannot be read, or cannot be copied.
        """

    @classmethod
    @abstractmethod
    def local(cls, path: StagedPath) -> Path:
        """Return the copy, which is made if there is none; the path itself if there can be none."""

    @classmethod
    @abstractmethod
    def clean(cls) -> None:
        """Remove all copies on this host that no process uses."""


COPIES: Final = EntryPoints[type[LocalCopies]]("freetrain.copies", "local copies", subclass_of(LocalCopies))
"""Name -> how copies are made; the first one is used."""


def paths_of(stage: object) -> tuple[StagedPath, ...]:
    """Return the paths that an app's option `stage` names, not yet described.

    Raises
    ------
    InvalidApp
        It is not a list of names.
    """
    if isinstance(stage, Mapping):
        named = dict(stage)
    elif isinstance(stage, Sequence) and not isinstance(stage, (str, bytes)):
        named = {name: name for name in stage}
    else:
        raise InvalidApp(f"stage is a list of files and directories, such as ['data/train.npz'], got {stage!r}")
    for given in (*named, *named.values()):
        if not isinstance(given, (str, Path)) or not str(given) or not str(given).isprintable():
            raise InvalidApp(f"stage names files and directories by their paths, got {given!r}")
    return tuple(StagedPath(_normal(name), str(Path(path).absolute())) for name, path in named.items())


def described(stage: tuple[StagedPath, ...]) -> tuple[StagedPath, ...]:
    """Return what a training job that is submitted now stages; raises `InvalidApp` as `LocalCopies.describe`."""
    if not stage:
        return ()
    copies = next(COPIES.usable())
    return tuple(copies.describe(path) for path in stage)


def local_path(name: str | Path, options: SessionOptions) -> Path:
    """Return where to read what has this name in an app's option `stage`.

    Raises
    ------
    UsageError
        There is no such name.
    """
    if options.stage is None:
        return Path(name)
    wanted = _normal(name)
    found = next((path for path in options.stage if path.name == wanted), None)
    if found is None:
        known = ", ".join(path.name for path in options.stage) or "nothing"
        raise UsageError(f"session.staged({str(name)!r}): the app stages {known}; name it: stage=[{str(name)!r}]")
    return next(COPIES.usable()).local(found) if found.key else Path(found.path)


def _normal(name: str | Path) -> str:
    return os.path.normpath(name)
