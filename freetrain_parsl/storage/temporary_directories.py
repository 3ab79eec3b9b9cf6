"""Private temporary directories that are removed although their process was killed: by the next one that makes some.

Each is locked while its process lives, so that it can be told from an abandoned one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["lock_directory", "make_locked_directory", "remove_abandoned"]


def make_locked_directory(prefix: str) -> tuple[Path, int | None]:
    """Make a private directory among the temporary files, and lock it.

    Parameters
    ----------
    prefix
        Of its name; see `remove_abandoned`.

    Returns
    -------
    path, lock
        The lock is a descriptor, which is to be closed after the directory has been removed; ``None`` on a file system
        without locks, where nothing is ever found abandoned.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            return path, lock_directory(path, fcntl.LOCK_SH)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process has removed it, or is about to
        except OSError:
            return path, None


def remove_abandoned(prefix: str) -> None:
    """Remove the directories of this user whose process was killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # in use, another user's, or removed
            lock = lock_directory(path, fcntl.LOCK_EX)
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def lock_directory(path: Path, kind: int) -> int:
    """Lock a directory until the returned descriptor is closed; ``kind`` is as of `fcntl.flock`.

    Raises
    ------
    OSError
        It is locked otherwise, was removed, or cannot be locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.lstat()):  # else it was removed before it was locked
            raise FileNotFoundError(f"{path} was replaced before it was locked")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
