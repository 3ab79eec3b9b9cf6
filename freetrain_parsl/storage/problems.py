"""Conversion of file system errors: which of them are temporary, and how they are described to the user."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, TypeGuard

from freetrain_parsl.errors import CheckpointError, StorageUnavailable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["condition_of", "is_unavailable", "storage_error"]

_CONDITIONS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is over its quota",
    errno.EIO: "has I/O errors",
    errno.ESTALE: "has a stale file handle",
    errno.EROFS: "is read-only",
    errno.ENOENT: "is missing; is it mounted here?",
    errno.ENODEV: "is missing; is it mounted here?",
    errno.ENXIO: "is missing; is it mounted here?",
    errno.EACCES: "may not be accessed",
    errno.EPERM: "may not be accessed",
    errno.ENOTCONN: "is not connected",
    errno.ETIMEDOUT: "does not answer",
    errno.EHOSTDOWN: "does not answer",
    errno.EHOSTUNREACH: "does not answer",
    errno.ENOLCK: "has no locks available",
}
"""Failures of a directory that was usable when the run began: they may be temporary; no training job causes them."""


def is_unavailable(error: BaseException | None) -> TypeGuard[OSError]:
    """Return whether an error means that a file system is temporarily unavailable."""
    return isinstance(error, OSError) and error.errno in _CONDITIONS


def condition_of(directory: Path | str, error: OSError) -> str:
    """Describe the condition of a checkpoint directory, such as ``the checkpoint directory /ck is full (ENOSPC)``."""
    assert error.errno is not None, "called only if `is_unavailable`"
    return f"the checkpoint directory {directory} {_CONDITIONS[error.errno]} ({errno.errorcode[error.errno]})"


def storage_error(attempt: str, directory: Path, error: OSError) -> CheckpointError:
    """Return the error of a failed attempt, to be raised from `error`: `StorageUnavailable` if it may be temporary.

    The attempt is such as ``cannot write a checkpoint of step 5 in /ck/net``.
    """
    message = f"{attempt}: {error.strerror or error}"
    if is_unavailable(error):
        return StorageUnavailable(message, condition_of(directory, error))
    return CheckpointError(message)
