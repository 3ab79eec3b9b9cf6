"""Ownership: nothing is read from or written to files that another user could have prepared.

A run directory may have been left by another user, in a shared directory. Nothing of it is trusted: a link may point
anywhere, a pipe blocks its reader, and a database can name files that SQLite removes. A directory that others may write
counts as one of others, as its content may be theirs. For root, too, only root's own directories are its own.

As ssh does with its keys: every directory from the checkpoint root down to the files must belong to this user or to
root, and must not be writable by other users. Only a sticky root, such as a shared scratch directory, may be writable
by others: files of other users in it are rejected by their owner.
"""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from freetrain_parsl.errors import ForeignCheckpoint, InvalidInput
from freetrain_parsl.storage.atomic_files import sync_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LARGEST_OF_OTHERS",
    "OpenDirectory",
    "check_owned",
    "check_root",
    "check_tree",
    "make_private",
    "open_directory",
    "open_own_file",
    "open_text",
    "read_small_file",
    "require_own_directory",
    "require_own_entries",
    "user_name",
]

LARGEST_OF_OTHERS: Final = 256 << 20
"""Bytes of a file of another user that are read."""

_LARGEST_SMALL = 64 << 20  # bytes of a file that is read at once
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = 0o700


class OpenDirectory:
    """An open directory: what is opened in it is in the directory that was checked, whatever its path names later.

    The last part of `path` is no link.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        facts = os.fstat(descriptor)
        self.owner = facts.st_uid
        self.mode = stat.S_IMODE(facts.st_mode)

    def distrust(self, name: str | None = None) -> str:
        """Return why its content may be of others: ``belongs to …``; empty if only this user could have written it.

        Parameters
        ----------
        name
            A file in it that must be this user's, too, if it exists.

        Raises
        ------
        OSError
            The file cannot be accessed.
        """
        if self.owner != os.geteuid():
            return f"belongs to {user_name(self.owner)}"
        if self.mode & _OTHERS_WRITE:
            return f"can be changed by other users (mode {self.mode:04o})"
        if name is None:
            return ""
        try:
            facts = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return ""
        if facts.st_uid != self.owner:
            return f"has a {name} that belongs to {user_name(facts.st_uid)}"
        if stat.S_ISREG(facts.st_mode) and facts.st_mode & _OTHERS_WRITE:
            return f"has a {name} that can be changed by other users (mode {stat.S_IMODE(facts.st_mode):04o})"
        return ""

    def open_file(self, name: str, most: int | None = None) -> int:
        """Open a file for reading, and return its descriptor; `most` is how many bytes it may have.

        Raises
        ------
        InvalidInput
            It is a link, a pipe or another thing than a regular file, it belongs to somebody else than the directory,
            or it is larger.
        OSError
            It does not exist, or cannot be accessed.
        """
        path = self.path / name
        facts = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISREG(facts.st_mode):  # opening a device may do anything, so before
            raise InvalidInput(f"{path} is {_kind(facts.st_mode)}, not a regular file; remove it")
        descriptor = os.open(name, os.O_RDONLY | _NO_LINK, dir_fd=self.descriptor)
        facts = os.fstat(descriptor)
        why = ""
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != self.owner:
            why = f"belongs to {user_name(facts.st_uid)}, its directory to {user_name(self.owner)}; remove it"
        elif most is not None and facts.st_size > most:
            why = f"has {facts.st_size:,} bytes; at most {most:,} are read"
        if why:
            os.close(descriptor)
            raise InvalidInput(f"{path} {why}")
        return descriptor

    def state_of(self, name: str) -> tuple[int, int, int]:
        """Return what changes when a file is written or replaced: inode, size and time; zeros if there is none."""
        try:
            facts = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return 0, 0, 0
        return facts.st_ino, facts.st_size, facts.st_mtime_ns


@contextmanager
def open_directory(path: Path) -> Iterator[OpenDirectory]:
    """Open a directory. A link of this user's, or of root's, is followed to it, others are refused.

    Raises
    ------
    InvalidInput
        It is a link of another user.
    OSError
        It does not exist, is no directory, or cannot be accessed.
    """
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        if facts.st_uid not in (os.geteuid(), 0):
            raise InvalidInput(f"{path} is a link of {user_name(facts.st_uid)}; give the directory itself")
        path = Path(os.path.realpath(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield OpenDirectory(path, descriptor)
    finally:
        os.close(descriptor)


def require_own_directory(path: Path, remedy: str) -> None:
    """Refuse a directory in which another user could have put anything, before anything in it is opened.

    Parameters
    ----------
    path
        An existing directory.
    remedy
        What to do instead.

    Raises
    ------
    InvalidInput
        It is not this user's, or others may write it.
    OSError
        It cannot be accessed.
    """
    with open_directory(path) as directory:
        if why := directory.distrust():
            raise InvalidInput(f"{path} {why}; {remedy}")


def require_own_entries(path: Path, remedy: str) -> None:
    """Apply `require_own_directory`, and refuse links and things of others directly in the directory.

    Parameters
    ----------
    path, remedy
        As of `require_own_directory`.

    Raises
    ------
    InvalidInput
        It, or something in it, is not this user's.
    OSError
        It cannot be accessed.
    """
    require_own_directory(path, remedy)
    with os.scandir(path) as entries:
        for entry in entries:
            facts = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode) or facts.st_uid != os.geteuid():
                raise InvalidInput(f"{entry.path} is {_kind(facts.st_mode)} of {user_name(facts.st_uid)}; {remedy}")


def open_own_file(path: Path, flags: int) -> int:
    """Open a file to write it, in a directory of this user's, and return its descriptor; links are not followed.

    Parameters
    ----------
    path
        The file.
    flags
        Of `os.open`, with ``O_CREAT`` if it may be missing.

    Raises
    ------
    InvalidInput
        It, or its directory, is not this user's, or it is not a regular file.
    OSError
        It cannot be opened.
    """
    with open_directory(path.parent) as directory:
        if why := directory.distrust():
            raise InvalidInput(f"{directory.path} {why}; its files are not written")
        with suppress(FileNotFoundError):
            found = os.stat(path.name, dir_fd=directory.descriptor, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise InvalidInput(
                    f"{path} is {_kind(found.st_mode)} of {user_name(found.st_uid)}, not a file of yours; remove it"
                )
        return os.open(path.name, flags | _NO_LINK, 0o600, dir_fd=directory.descriptor)


def read_small_file(path: Path) -> str:
    """Return the text of a file of a run.

    Raises
    ------
    InvalidInput
        It is a link, a pipe or another thing than a regular file of the owner of its directory, or it is too large.
    OSError
        It does not exist, or cannot be accessed.
    UnicodeDecodeError
        It is not UTF-8.
    """
    with open_directory(path.parent) as directory:
        descriptor = directory.open_file(path.name, _LARGEST_SMALL)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_LARGEST_SMALL).decode()


def open_text(path: Path) -> IO[str]:
    """Open a text of a run, such as a log, whose lines end with a line feed; what is not UTF-8 is replaced.

    Raises
    ------
    InvalidInput
        As of `read_small_file`; of others, files up to `LARGEST_OF_OTHERS` are read.
    OSError
        It does not exist, or cannot be accessed.
    """
    with open_directory(path.parent) as directory:
        most = LARGEST_OF_OTHERS if directory.distrust() else None
        descriptor = directory.open_file(path.name, most)
    return os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n")


def user_name(number: int) -> str:
    """Return the name of a user."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")


def check_root(root: Path) -> None:
    """Check that the checkpoint root, which may be a symbolic link of this user, is safe.

    Raises
    ------
    ForeignCheckpoint
        It is not; the message gives the reason and the remedy.
    OSError
        It cannot be accessed.
    """
    link = os.lstat(root)
    if stat.S_ISLNK(link.st_mode):
        _check_owner(root, link)
    facts = os.stat(root)  # noqa: PTH116 - used next to lstat
    _check_owner(root, facts)
    if facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
        raise _writable(root, facts)


def check_owned(path: Path) -> None:
    """Check that a file or directory below the root belongs to this user and is not writable by other users.

    Raises
    ------
    ForeignCheckpoint
        The check failed, or it is a symbolic link; the message gives the reason and the remedy.
    OSError
        It cannot be accessed.
    """
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        raise ForeignCheckpoint(f"{path} is a symbolic link, which could point anywhere; replace it with its target")
    _check_owner(path, facts)
    if facts.st_mode & _OTHERS_WRITE:
        raise _writable(path, facts)


def check_tree(path: Path) -> None:
    """Apply `check_owned` to a directory and everything in it."""
    check_owned(path)
    with os.scandir(path) as entries:
        for entry in entries:
            child = path / entry.name
            if entry.is_dir(follow_symlinks=False):
                check_tree(child)
            else:
                check_owned(child)


def make_private(path: Path) -> None:
    """Create a directory and its missing parents durably, accessible to this user only, whatever the umask.

    Raises
    ------
    OSError
        A directory cannot be created.
    """
    if not path.parent.exists():
        make_private(path.parent)
    try:
        path.mkdir(mode=_PRIVATE)
        sync_name(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def _check_owner(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        raise ForeignCheckpoint(
            f"{path} belongs to {user_name(facts.st_uid)}, who could have put anything there; remove it, or use "
            "another name or checkpoint directory"
        )


def _writable(path: Path, facts: os.stat_result) -> ForeignCheckpoint:
    mode = stat.S_IMODE(facts.st_mode)
    return ForeignCheckpoint(f"{path} can be changed by other users (mode {mode:04o}); run: chmod go-w {path}")
