"""One notebook controls a run; others look at it.

The controlling process holds a POSIX lock, which the system removes with the process, so that a restarted kernel gets
it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from typing import TYPE_CHECKING, Final

from freetrain_parsl.campaign.directories import CONTROL
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.storage.owned_files import open_own_file, open_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["controller_of", "take_control"]

_HELD: Final[dict[tuple[int, int], int]] = {}
"""Device and inode of a file -> descriptor: closing it, or another one of the file, would release the lock."""


def take_control(run_dir: Path) -> bool:
    """Make this process the one that controls a run, until it ends; return whether it does.

    On a file system without locks, each process does; in a directory that cannot be written, none.

    Raises
    ------
    InvalidInput
        The file is a link, or not this user's.
    """
    path = run_dir / CONTROL
    with contextlib.suppress(OSError):  # it may have been removed, with its directory, and made again
        if _identity(path.stat()) in _HELD:
            return True
    try:
        file = open_own_file(path, os.O_CREAT | os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        return False
    except OSError:
        pass
    with contextlib.suppress(OSError):  # the disk is full
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    _HELD[_identity(os.fstat(file))] = file
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def controller_of(run_dir: Path) -> str:
    """Describe the process that controlled a run last; empty: none did."""
    try:
        with open_text(run_dir / CONTROL) as file:
            return file.read(100)
    except (OSError, InvalidInput):
        return ""
