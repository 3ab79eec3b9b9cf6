"""Ownership checks: nothing is read from or written to files that another user could have prepared.

As ssh does with its keys: every directory from the checkpoint root down to the files must belong to this user or to
root, and must not be writable by other users. Only a sticky root, such as a shared scratch directory, may be writable
by others: files of other users in it are rejected by their owner.
"""

from __future__ import annotations

import os
import pwd
import stat
from typing import TYPE_CHECKING

from freetrain_parsl.errors import ForeignCheckpoint
from freetrain_parsl.storage.atomic_files import sync_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_owned", "check_root", "check_tree", "make_private"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE = 0o700


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
