"""The temporary directory of a node's worker pool.

The processes of a pool are killed when their node ends, so none of them can remove its temporary files. The pilot
removes them, and those of earlier pools on this node whose pilot was killed, too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freetrain_parsl.storage.temporary_directories import lock_directory, make_locked_directory, remove_abandoned

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
        remove_abandoned(_PREFIX)
        self._lock: int | None
        self.path, self._lock = make_locked_directory(_PREFIX)
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
            lock_directory(Path(path), fcntl.LOCK_SH)
    return path
