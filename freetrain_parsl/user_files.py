"""Opening files that the user has named: regular files, and pipes to which another program writes, as of ``<(…)``."""

from __future__ import annotations

import errno
import os
import select
import stat

__all__ = ["open_bounded", "open_named"]

_PATIENCE = 500  # milliseconds for a program to open the other end of a pipe


def open_named(file: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file of any length; usable as the opener of `open`.

    Raises
    ------
    OSError
        It cannot be opened, is a directory or a device, or is a pipe that nobody writes to.
    """
    descriptor = open_bounded(file, flags)
    if not (stat.S_ISREG(kind := os.fstat(descriptor).st_mode) or stat.S_ISFIFO(kind)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a device; give a file", os.fspath(file))
    return descriptor


def open_bounded(file: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file of which only so much is read that an endless device does no harm; as `open_named` otherwise."""
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block
    try:
        kind = os.fstat(descriptor).st_mode
        written = not stat.S_ISFIFO(kind) or _is_written(descriptor)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    if stat.S_ISDIR(kind) or not written:
        os.close(descriptor)
        if written:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(file))
        raise OSError(errno.EAGAIN, "it is a pipe, and nothing writes to it; give a file", os.fspath(file))
    return descriptor


def _is_written(descriptor: int) -> bool:
    """Return whether there is something to read in a pipe, or a program that has opened it and may write later."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    if waiting.poll(_PATIENCE):
        return True
    try:
        return os.read(descriptor, 1) != b""  # only if its writer comes just now: then what follows is refused
    except BlockingIOError:
        return True
