"""Staging directories: the fence against stale writers in a directory that several processes may try to write.

A writer prepares everything in its *staging directory* and publishes it with a single rename. The next writer creates
its own staging directory and removes the previous one. A writer that was stopped or disconnected and then resumes finds
its staging directory gone: each of its renames fails, without a check after which it could be stopped again.
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
"""Prefix of all names that do not count as published."""

_WRITER = "writer"
_PREFIX = f"{TEMPORARY}writer-"
_PRIVATE = 0o600


class Staging:
    """The staging directory of one writer.

    Parameters
    ----------
    parent
        The directory to write in; all previous writers are fenced off.
    generation
        Generation of the writing group, for users.

    Raises
    ------
    OSError
        The file system operation failed.
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
        """Return whether no other writer has taken over; also true if the file system does not show it."""
        try:
            self._parent.stat()
        except OSError:  # the whole directory is missing, perhaps unmounted: that is not another writer
            return True
        try:
            return self.path.is_dir()
        except OSError:  # reported by network file systems for a directory that another machine removed
            return False

    def successor(self) -> str:
        """Describe the current writer as far as known."""
        try:
            return (self._parent / _WRITER).read_text(encoding="utf-8").strip()
        except OSError:
            return "unknown"

    def replace(self, name: str, text: str) -> None:
        """Durably replace a small file in the parent directory."""
        aside = self.path / name
        write_text(aside, text)
        aside.replace(self._parent / name)
        sync_directory(self._parent)

    def note(self, name: str, text: str) -> None:
        """Like `replace`, for an informational file: if the disk is full, the previous one remains."""
        try:
            self.replace(name, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def remove(self, path: Path) -> None:
        """Remove an entry of the parent directory; it never appears partially removed."""
        doomed = self.path / f"gone-{path.name}"
        path.rename(doomed)
        _remove(doomed)

    def close(self) -> None:
        """Remove the staging directory."""
        shutil.rmtree(self.path, ignore_errors=True)  # the next writer removes what is left

    def _take_away(self, stale: Path) -> None:
        doomed = self.path / f"gone-{stale.name}"
        with contextlib.suppress(FileNotFoundError):  # its writer has just ended
            stale.rename(doomed)  # this fences it off; what follows only frees space
            if doomed.is_dir():
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                doomed.unlink()


def open_private(path: Path) -> IO[bytes]:
    """Open a file for writing that only this user can read, whatever the umask."""
    file = path.open("wb")
    os.fchmod(file.fileno(), _PRIVATE)
    return file


def write_text(path: Path, text: str) -> None:
    """Write a small file durably."""
    with open_private(path) as file:
        file.write(text.encode())
        sync(file)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file; see `replace_file`."""
    replace_file(path, text.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file: atomically, durably, and such that only this user can read it.

    Raises
    ------
    OSError
        It cannot be written; the file before is untouched, and nothing else is left.
    """
    aside = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with open_private(aside) as file:
            file.write(data)
            sync(file)
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            aside.unlink()
        raise
    sync_directory(path.parent)


def sync(file: IO[bytes]) -> None:
    """Make the data written to a file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_name(path: Path) -> None:
    """Make the name of a new directory durable, unless its parent may only be written."""
    with contextlib.suppress(PermissionError):
        sync_directory(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
