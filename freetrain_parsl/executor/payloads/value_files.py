"""Results that are too large for the control channel: files in the checkpoint directory, which nodes and driver share.

A result on the way delays the heartbeats of its slot, which count as missing after seconds, while encrypted messages
take that long for each hundred megabytes. The channel therefore carries only what identifies the file: its name, size
and SHA-256. The driver deserializes exactly the bytes that were announced over the authenticated channel: a file that
someone else has written or changed has no effect.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
import time
from typing import IO, TYPE_CHECKING, Final

from freetrain_parsl.errors import CheckpointError
from freetrain_parsl.protocol.messages import StoredValue
from freetrain_parsl.storage.atomic_files import sync_directory
from freetrain_parsl.storage.owned_files import check_owned, check_root, make_private
from freetrain_parsl.storage.problems import storage_error
from freetrain_parsl.storage.root import check_same_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

__all__ = ["LARGEST_MESSAGE", "ValueFiles"]

LARGEST_MESSAGE: Final = 4 << 20
"""Bytes; a larger value goes to a file."""

_DIRECTORY: Final = ".results"
_PART: Final = 16 << 20  # bytes that are written or read at once
_OLD: Final = 24 * 3600.0  # seconds after which a file, which a driver takes within seconds, belongs to a dead one
_LATE: Final = (0.1, 0.4, 1.5, 3.0)  # seconds between looks: a network file system may show a new file late


class ValueFiles:
    """The files of one driver, written by its slots, each read and removed once.

    Parameters
    ----------
    root
        The checkpoint directory.
    identity
        From `identify_root`; empty if unknown.
    run
        Name of the run; its drivers follow each other.
    driver
        Name of this driver, other than those of all earlier ones; letters and digits.
    """

    def __init__(self, root: Path, identity: str, run: str, driver: str) -> None:
        self._root = root
        self._identity = identity
        self._run = run
        self._above = root / _DIRECTORY
        self._directory = self._above / f"{run}.{driver}"

    # Slots.

    def store(self, payload: bytes) -> StoredValue:
        """Write a value durably to a file of its own, private to the user.

        Raises
        ------
        StorageUnavailable
            It cannot be written at present.
        CheckpointError
            It cannot be written.
        """
        attempt = f"cannot write a result of {len(payload):,} bytes in {self._directory}"
        if self._identity:
            check_same_root(self._root, self._identity)
        try:
            check_root(self._root)
            self._prepare()
            name = secrets.token_hex(16)
            digest = self._write(self._directory / name, payload)
        except OSError as error:
            raise storage_error(attempt, self._root, error) from error
        return StoredValue(name, len(payload), digest)

    def _prepare(self) -> None:
        make_private(self._directory)
        check_owned(self._above)
        check_owned(self._directory)

    def _write(self, path: Path, payload: bytes) -> str:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:  # another driver has just removed the directory, which was empty for long
            self._prepare()
            descriptor = os.open(path, flags, 0o600)
        digest = hashlib.sha256()
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                rest = memoryview(payload)
                while rest:
                    count = file.write(rest[:_PART])
                    digest.update(rest[:count])
                    rest = rest[count:]
                os.fsync(file.fileno())
            sync_directory(self._directory)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return digest.hexdigest()

    # The driver.

    def clear(self) -> None:
        """Remove what earlier drivers of this run have left, and what others have left long ago.

        Best effort: files that stay cost space only.
        """
        with contextlib.suppress(OSError, CheckpointError):
            check_owned(self._above)
            for directory in self._above.iterdir():
                check_owned(directory)
                if directory.name.rpartition(".")[0] == self._run and directory != self._directory:
                    shutil.rmtree(directory, ignore_errors=True)
                else:
                    _remove_old(directory)

    @contextlib.contextmanager
    def take(self, stored: StoredValue) -> Iterator[IO[bytes]]:
        """Open the file of a value for a ``with`` block once its bytes are those that were announced; then remove it.

        Only this user could change it between: who can write there has been checked.

        Raises
        ------
        StorageUnavailable
            It cannot be read at present.
        CheckpointError
            It cannot be read, or has other bytes than were announced.
        """
        path = self._directory / stored.name
        try:
            with os.fdopen(_open_late(path), "rb") as file:
                _compare(file, path, stored)
                yield file
        except OSError as error:
            raise storage_error(f"cannot read the result in {path}", self._root, error) from error
        finally:
            self.discard(stored)

    def discard(self, stored: StoredValue) -> None:
        """Remove the file of a value."""
        with contextlib.suppress(OSError):
            (self._directory / stored.name).unlink()

    def close(self) -> None:
        """Remove all files of this driver."""
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: of other runs
            self._above.rmdir()


def _compare(file: IO[bytes], path: Path, stored: StoredValue) -> None:
    """Compare a file with what was announced."""
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size != stored.size:
        raise CheckpointError(f"the result in {path} is not the file of {stored.size:,} bytes that was written")
    digest = hashlib.sha256()
    while part := file.read(_PART):
        digest.update(part)
    if digest.hexdigest() != stored.digest:
        raise CheckpointError(f"the result in {path} has other bytes than were written; check the file system")
    file.seek(0)


def _open_late(path: Path) -> int:
    for pause in _LATE:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:  # noqa: PERF203 - few
            time.sleep(pause)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _remove_old(directory: Path) -> None:
    for path in directory.iterdir():
        if time.time() - path.lstat().st_mtime > _OLD:
            path.unlink()
    if time.time() - directory.stat().st_mtime > _OLD:
        with contextlib.suppress(OSError):  # not empty
            directory.rmdir()
