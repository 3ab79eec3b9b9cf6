"""The temporary directory of a node's worker pool.

The processes of a pool are killed when their node ends, so none of them can remove its temporary files. The pilot
removes them, and those of earlier pools on this node whose pilot was killed, too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["POOL_DIRECTORY", "PoolDirectory", "hold_pool_directory"]

POOL_DIRECTORY: Final = "FREETRAIN_POOL_DIRECTORY"  # environment variable, for the pool
_PREFIX: Final = "ft-pool-"  # short: the path of a socket has at most 107 characters


class PoolDirectory:
    """A private directory that exists during a ``with`` block.

    It is locked while its pilot or its pool lives, so that it can be told from an abandoned one.

    Attributes
    ----------
    path : pathlib.Path
        The directory.
    """

    path: Path

    def __enter__(self) -> Self:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self._lock: int | None = None
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            try:
                self._lock = _lock(self.path, fcntl.LOCK_SH)
            except (BlockingIOError, FileNotFoundError):
                continue  # another pilot has removed it, or is about to
            except OSError:  # a file system without locks, where nothing is ever found abandoned
                pass
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # processes that are being killed may still create files
        self.release()

    def release(self) -> None:
        """Close the lock: at the end, or in a process that was forked from the pilot."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def hold_pool_directory() -> str | None:
    """Lock the directory of this pool until this process ends, and return it; ``None`` without a pilot."""
    path = os.environ.pop(POOL_DIRECTORY, None)
    if path is not None:
        with suppress(OSError):  # a file system without locks
            _lock(Path(path), fcntl.LOCK_SH)
    return path


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or removed
            lock = _lock(path, fcntl.LOCK_EX)
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path, kind: int) -> int:
    """Lock a directory until the returned descriptor is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        path.lstat()  # else it was removed before it was locked
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
