"""SQLite files of a run, for reading: nothing that is in them makes SQLite write or remove a file.

A database may have a rollback journal that was left by a process that was killed. SQLite finishes it, if it may write,
and it may remove another file on the way, which the journal names. So a database of this user is opened with
``mode=ro``, and one that others may have written is copied before it is opened. See decision 67.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import threading
import time
import weakref
from collections import OrderedDict
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.storage.owned_files import LARGEST_OF_OTHERS, open_directory
from freetrain_parsl.storage.temporary_directories import make_locked_directory, remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from freetrain_parsl.storage.owned_files import OpenDirectory

__all__ = ["DatabaseReading", "PrivateCopies", "open_for_reading", "refuse_super_journal", "seen_state"]

_BUSY = 30.0  # seconds to wait for another process's lock
_JOURNAL_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")  # of SQLite's rollback journals
_TAIL = struct.Struct(">II8s")  # at their end: length and checksum of a super-journal's name
_PREFIX = "freetrain-copy-"  # of their directories
_COPY_AGE = 3.0  # seconds for which a copy is shown, although the file has changed
_COPIES = 16
_ATTEMPTS = 20  # to copy a file that is being written
_PAUSE = 0.04  # seconds between them
_OTHERS_SECONDS = 1.0  # for a query to a database of others
_LONGEST_VALUE = 16 << 20  # bytes of a text of others
_HANDLER_STEPS = 10_000  # instructions of SQLite between looks at the clock
_MOST_OBJECTS = 64  # tables and indices in a database of ours


class DatabaseReading:
    """An open database.

    Parameters
    ----------
    connection
        Of this thread.
    of_others
        Whether others may have written it: each query has a time limit, each text a limit of its length.
    clock
        Monotonic, in seconds.
    """

    def __init__(self, connection: sqlite3.Connection, *, of_others: bool, clock: Callable[[], float]) -> None:
        self.connection = connection
        self._clock = clock
        self._end = 0.0
        self.restart()
        if of_others:
            connection.set_progress_handler(lambda: int(self._clock() > self._end), _HANDLER_STEPS)
            connection.text_factory = _short_text

    def restart(self) -> None:
        """Begin the time limit anew: the query continues in good order."""
        self._end = self._clock() + _OTHERS_SECONDS


class PrivateCopies:
    """Copies of databases that are not opened where they are, in private directories; removed at the end.

    Those of a process that was killed are removed by the next one that makes a copy.

    Parameters
    ----------
    clock
        Monotonic, in seconds.
    sleep
        Waits before another attempt.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._copies: OrderedDict[tuple[int, int, str], _Copy] = OrderedDict()
        self._looked = False

    def copy_of(self, directory: OpenDirectory, name: str, *, with_journal: bool = False) -> _Copy:
        """Return a copy of a database with its write-ahead log, made anew at most every few seconds.

        Parameters
        ----------
        directory, name
            Where it is.
        with_journal
            Whether to copy a rollback journal, too; otherwise, with one, the database cannot be read.

        Raises
        ------
        InvalidInput
            It is not a regular file of the directory's owner, is too large, is always being written, or its journal
            names another file.
        OSError
            It does not exist, or cannot be copied.
        """
        key = self._key(directory, name)
        with self._lock:
            if not self._looked:
                remove_abandoned(_PREFIX)
                self._looked = True
            kept = self._copies.pop(key, None)
            state = _state(directory, name)
            if kept is None or (state != kept.state and self._clock() - kept.made >= _COPY_AGE):
                kept = self._copied(directory, name, with_journal=with_journal)
            self._copies[key] = kept
            while len(self._copies) > _COPIES:
                self._copies.popitem(last=False)
            return kept

    def seen_state(self, directory: OpenDirectory, name: str) -> tuple[int, ...]:
        """Return the state of a database as `copy_of` would show it."""
        state = _state(directory, name)
        with self._lock:
            kept = self._copies.get(self._key(directory, name))
            return state if kept is None or self._clock() - kept.made >= _COPY_AGE else kept.state

    def _key(self, directory: OpenDirectory, name: str) -> tuple[int, int, str]:
        facts = os.fstat(directory.descriptor)
        return facts.st_dev, facts.st_ino, name

    def _copied(self, directory: OpenDirectory, name: str, *, with_journal: bool) -> _Copy:
        why = "is being written"
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(_PAUSE)
            before = _state(directory, name)
            if before[-2] and not with_journal:  # the size of the journal
                why = "has an unfinished transaction, which only its owner can finish"
                continue
            copy = _Copy(name, before, self._clock(), has_journal=with_journal)
            for file in (name, f"{name}-wal", *([f"{name}-journal"] if with_journal else [])):
                _copy_file(directory, file, copy.path.parent, required=file == name)
            with open_directory(copy.path.parent) as copied:
                refuse_super_journal(copied, name, directory.path)
            if _state(directory, name) == before:
                return copy
            why = "is being written"
        raise InvalidInput(f"{directory.path / name} {why}; try again later")


class _Copy:
    """A copy of a database; its directory is removed with the last reference to it."""

    def __init__(self, name: str, state: tuple[int, ...], made: float, *, has_journal: bool) -> None:
        place, lock = make_locked_directory(_PREFIX)
        weakref.finalize(self, _remove, place, lock)  # at the latest when the process ends
        self.path = place / name
        self.state = state
        self.made = made
        self.has_journal = has_journal


def _remove(directory: Path, lock: int | None) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if lock is not None:
        os.close(lock)


_copies: Final = PrivateCopies()


@contextmanager
def open_for_reading(
    path: Path,
    copies: PrivateCopies = _copies,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[DatabaseReading]:
    """Open a database of a run that has plain tables only.

    Parameters
    ----------
    path
        The file.
    copies
        Keeps the copies of databases that others may have written.
    clock
        Monotonic, in seconds, for the time limit of queries to those.

    Raises
    ------
    InvalidInput
        It is a link, a pipe, too large, …
    FileNotFoundError, OSError
        It does not exist, or cannot be accessed.
    sqlite3.Error
        It cannot be read, has views or triggers, or takes too long.
    """
    with open_directory(path.parent) as directory:
        name = path.name
        os.close(directory.open_file(name))  # it is a regular file of the directory's owner
        if of_others := bool(directory.distrust(name)):
            copy = copies.copy_of(directory, name)
        elif (own := _opened_in_place(directory.path / name)) is not None:
            with closing(own):
                yield DatabaseReading(own, of_others=False, clock=clock)
            return
        else:
            copy = copies.copy_of(directory, name, with_journal=True)
        with closing(_connected(copy.path, "rw" if copy.has_journal else "ro")) as connection:
            reading = DatabaseReading(connection, of_others=of_others, clock=clock)
            _check_schema(connection)
            reading.restart()
            yield reading


def seen_state(path: Path, copies: PrivateCopies = _copies) -> tuple[int, ...]:
    """Return what has changed if there is something new to read: of its files, or of the copy that is shown instead.

    Raises
    ------
    OSError
        It does not exist, or cannot be accessed.
    """
    with open_directory(path.parent) as directory:
        if directory.distrust(path.name):
            return copies.seen_state(directory, path.name)
        return _state(directory, path.name)


def _opened_in_place(path: Path) -> sqlite3.Connection | None:
    """Open a database of this user; ``None`` if its writer was killed while it wrote: the next driver finishes that."""
    connection = _connected(path, "ro")
    try:
        _check_schema(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError) and "readonly database" in str(error):
            return None
        raise
    return connection


def refuse_super_journal(directory: OpenDirectory, name: str, original: Path | None = None) -> None:
    """Refuse a database whose rollback journal names a super-journal: SQLite would remove that file, whatever it is.

    Databases of this package never have one.

    Parameters
    ----------
    directory, name
        Where the database is.
    original
        The directory of which this one has a copy.

    Raises
    ------
    InvalidInput
        It has one.
    OSError
        The journal cannot be accessed.
    """
    journal = f"{name}-journal"
    try:
        descriptor = directory.open_file(journal)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL.size:
            return
        file.seek(size - _TAIL.size)
        length, _checksum, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic == _JOURNAL_MAGIC and length:
        raise InvalidInput(
            f"{(original or directory.path) / journal} names another file, which SQLite would remove; it was "
            "tampered with: remove the run directory"
        )


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=_BUSY, uri=True)
    try:
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_schema(connection: sqlite3.Connection) -> None:
    """Refuse views, triggers and virtual tables, which may compute for ever.

    Raises
    ------
    sqlite3.DatabaseError
        It has some.
    """
    found = connection.execute("SELECT name, sql FROM sqlite_master LIMIT ?", (_MOST_OBJECTS + 1,)).fetchall()
    odd = [
        name
        for name, text in found
        # What is in the column `type` does not count: SQLite goes by the statement.
        if text is not None and not str(text).upper().startswith(("CREATE TABLE ", "CREATE INDEX ", "CREATE UNIQUE "))
    ]
    if not odd:
        tables = [name for name, text in found if text is not None and str(text).upper().startswith("CREATE TABLE ")]
        query = "SELECT 1 FROM pragma_table_xinfo(?) WHERE hidden != 0 LIMIT 1"  # a generated column
        odd = [name for name in tables if connection.execute(query, (name,)).fetchone()]
    if odd or len(found) > _MOST_OBJECTS:
        what = f"has {str(odd[0])[:80]!r}, which is not a plain table" if odd else "has too many tables"
        raise sqlite3.DatabaseError(f"it {what}; it was tampered with")


def _short_text(raw: bytes) -> str:
    if len(raw) > _LONGEST_VALUE:
        raise sqlite3.DatabaseError(f"it has a text of {len(raw):,} bytes; at most {_LONGEST_VALUE:,} are read")
    return raw.decode(errors="replace")


def _state(directory: OpenDirectory, name: str) -> tuple[int, ...]:
    """Return inode, size and time of a database, its write-ahead log, and its rollback journal."""
    return tuple(fact for suffix in ("", "-wal", "-journal") for fact in directory.state_of(f"{name}{suffix}"))


def _copy_file(directory: OpenDirectory, name: str, target: Path, *, required: bool) -> None:
    try:
        descriptor = directory.open_file(name, LARGEST_OF_OTHERS)
    except FileNotFoundError:
        if required:
            raise
        return
    left = LARGEST_OF_OTHERS
    with os.fdopen(descriptor, "rb") as source, (target / name).open("xb") as copy:
        while left and (data := source.read(min(left, 1 << 20))):
            copy.write(data)
            left -= len(data)
