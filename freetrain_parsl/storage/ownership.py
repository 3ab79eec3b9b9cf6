"""Whose files these are: nothing is read from, or written into, what another user could have prepared.

As ssh does with its keys: every directory from the root of all checkpoints down to the files must belong to this user
or to root, and nobody else may write in it. Only a sticky root, such as a shared scratch directory, may be writable by
others: what others put there is refused by its owner.
"""

from __future__ import annotations

import os
import pwd
import stat
from typing import TYPE_CHECKING

from freetrain_parsl.errors import ForeignCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_owned", "check_root", "check_tree", "make_private"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE = 0o700


def check_root(root: Path) -> None:
    """Make sure that the root of all checkpoints, which may be a symbolic link of our own, is safe.

    Raises
    ------
    ForeignCheckpoint
        It is not; the message says why and how to mend it.
    OSError
        It cannot be looked at.
    """
    link = os.lstat(root)
    if stat.S_ISLNK(link.st_mode):
        _check_owner(root, link)
    facts = os.stat(root)  # noqa: PTH116 - beside lstat
    _check_owner(root, facts)
    if facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
        raise _writable(root, facts)


def check_owned(path: Path) -> None:
    """Make sure that a file or directory below the root belongs to us, and that nobody else may change it.

    Raises
    ------
    ForeignCheckpoint
        It does not, or it is a symbolic link; the message says why and how to mend it.
    OSError
        It cannot be looked at.
    """
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        raise ForeignCheckpoint(
            f"{path} is a symbolic link, and could lead anywhere; put what it leads to in its place"
        )
    _check_owner(path, facts)
    if facts.st_mode & _OTHERS_WRITE:
        raise _writable(path, facts)


def check_tree(path: Path) -> None:
    """Do as `check_owned` with a directory and all that is in it."""
    check_owned(path)
    with os.scandir(path) as entries:
        for entry in entries:
            child = path / entry.name
            if entry.is_dir(follow_symlinks=False):
                check_tree(child)
            else:
                check_owned(child)


def make_private(path: Path) -> None:
    """Make a directory, and those above it that are missing, with access for this user only, whatever the umask.

    Raises
    ------
    OSError
        The file system refuses.
    """
    if not path.parent.exists():
        make_private(path.parent)
    try:
        path.mkdir(mode=_PRIVATE)
    except FileExistsError:
        if not path.is_dir():
            raise


def _check_owner(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        raise ForeignCheckpoint(
            f"{path} belongs to {_user(facts.st_uid)}, who could have put anything there; remove it, or use another "
            "trainer name or checkpoint directory"
        )


def _writable(path: Path, facts: os.stat_result) -> ForeignCheckpoint:
    mode = stat.S_IMODE(facts.st_mode)
    return ForeignCheckpoint(f"{path} can be changed by other users (mode {mode:04o}); run: chmod go-w {path}")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
