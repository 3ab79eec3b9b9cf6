"""A writer's own place in a directory that several may believe to be theirs: the fence against stale writers.

Whatever a writer publishes, it prepares in its *staging directory* and then moves out of it by one rename. The next
writer makes a staging directory of its own and takes away that of the one before. A writer that was stopped, or cut
off, and comes back finds its own gone: each of its renames fails, without any check that it could be stopped after.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp-"
"""How the names of all begin that does not count as published."""

_WRITER = "writer"
_PREFIX = f"{TEMPORARY}writer-"
_PRIVATE = 0o600


class Staging:
    """The staging directory of one writer.

    Parameters
    ----------
    parent
        The directory to write in; all writers before this one are shut out.
    generation
        Of the group that writes, for people.

    Raises
    ------
    OSError
        The file system refuses.
    """

    def __init__(self, parent: Path, generation: int) -> None:
        self._parent = parent
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{generation}-", dir=parent))  # mkdtemp makes it private
        for stale in parent.glob(f"{TEMPORARY}*"):
            if stale != self.path:
                self._take_away(stale)
        self.note(_WRITER, f"generation {generation}, process {os.getpid()} on {socket.gethostname()}\n")

    @property
    def is_mine(self) -> bool:
        """Whether no other writer has come since; also true if the file system does not tell."""
        try:
            self._parent.stat()
        except OSError:  # the whole directory is gone, with the mount it is on perhaps: that is no other writer
            return True
        try:
            return self.path.is_dir()
        except OSError:  # network file systems say so of a directory that another machine removed
            return False

    def successor(self) -> str:
        """Say who writes now, as far as that is known."""
        try:
            return (self._parent / _WRITER).read_text(encoding="utf-8").strip()
        except OSError:
            return "unknown"

    def replace(self, name: str, text: str) -> None:
        """Put a small file into the parent directory in place of the one before, durably."""
        aside = self.path / name
        write_text(aside, text)
        aside.replace(self._parent / name)
        sync_directory(self._parent)

    def note(self, name: str, text: str) -> None:
        """Do as `replace` with a file that is for people only: without room for it, the one before stays."""
        try:
            self.replace(name, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def remove(self, path: Path) -> None:
        """Remove something of the parent directory; it is never seen half removed."""
        doomed = self.path / f"gone-{path.name}"
        path.rename(doomed)
        _remove(doomed)

    def close(self) -> None:
        """Leave; nothing of the staging directory stays."""
        shutil.rmtree(self.path, ignore_errors=True)  # the next writer clears what could not be removed

    def _take_away(self, stale: Path) -> None:
        doomed = self.path / f"gone-{stale.name}"
        with contextlib.suppress(FileNotFoundError):  # its writer ended just now
            stale.rename(doomed)  # this shuts it out; what follows only makes room
            if doomed.is_dir():
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                doomed.unlink()


def open_private(path: Path) -> IO[bytes]:
    """Open a file for writing that only this user may read, whatever the umask."""
    file = path.open("wb")
    os.fchmod(file.fileno(), _PRIVATE)
    return file


def write_text(path: Path, text: str) -> None:
    """Write a small file, durably."""
    with open_private(path) as file:
        file.write(text.encode())
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Make what was written into a file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
