"""The journal: what the driver observed, decided and did, in a SQLite file in the run directory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sqlite3
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.values.tracker import parse_row
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import type_name
from freetrain_parsl.protocol.journal import record_of
from freetrain_parsl.storage.read_only_database import open_for_reading
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.protocol.journal import Record
    from freetrain_parsl.protocol.reports import Progress
    from freetrain_parsl.storage.read_only_database import DatabaseReading

__all__ = [
    "Journal",
    "JournalEntry",
    "ValueSamples",
    "last_record",
    "newest_entry",
    "newest_report",
    "read_journal",
    "read_kinds",
    "read_progress",
]

_LEAST_PAUSE: Final = 1.0  # seconds between two values of a name
_SHARE: Final = 0.02  # of the time since the first value
_MOST_NAMES: Final = 20  # of a training job
_MOST_ROWS: Final = 3  # of a report that are looked at: the newest ones
_LONGEST_NAME: Final = 100

logger = logging.getLogger(__name__)

_MOST_KEPT = 20_000  # entries in memory while the file cannot be written
_PROGRESS_PAUSE = 1.0  # seconds between writes of progress reports
_LONGEST_PAUSE = 60.0  # seconds between attempts to write

_LAST_ID: Final = (1 << 63) - 1  # of SQLite

_SCHEMA = """
CREATE TABLE IF NOT EXISTS event (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,      -- seconds since the epoch
    kind TEXT NOT NULL,      -- a word, such as 'fragment_started'
    subject TEXT NOT NULL,   -- the training job, block or node that it is about
    detail TEXT NOT NULL     -- JSON object
);
CREATE TABLE IF NOT EXISTS progress (
    training TEXT PRIMARY KEY,
    time REAL NOT NULL,      -- of its last report, seconds since the epoch
    detail TEXT NOT NULL     -- JSON object: protocol.reports.Progress
);
"""


class ValueSamples:
    """Chooses values by time: two of a training job and name are at least 2 % of its age apart.

    So there are about fifty for each factor *e* of time: some four hundred in a day.
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[str, tuple[float, float]]] = {}  # training -> name -> first, last
        self._with_loss: set[str] = set()  # training jobs that report the loss of their steps

    def admit(self, training: str) -> None:
        """Choose values that this training job logs, too; slots may name others."""
        self._times.setdefault(training, {})

    def choose_loss(self, time: float, training: str, loss: float) -> dict[str, float]:
        """Return the mean loss of a progress report as ``loss``, if it is to be kept."""
        self._with_loss.add(training)
        return self.choose(time, training, {"loss": loss})

    def choose(self, time: float, training: str, values: Mapping[str, object]) -> dict[str, float]:
        """Return those of the values that are to be kept; `time` in seconds."""
        known = self._times.setdefault(training, {})
        chosen = {}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            key = name[:_LONGEST_NAME]
            if key not in known and len(known) == _MOST_NAMES:
                continue
            first, last = known.get(key, (time, -math.inf))
            if time - last >= max(_LEAST_PAUSE, _SHARE * (time - first)):
                known[key] = (first, time)
                chosen[key] = float(value)
        return chosen

    def choose_rows(self, time: float, training: str, rows: Sequence[str]) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the values to be kept of the newest rows of a report, see `protocol.reports.Logged`.

        Training jobs that were not admitted have none. A value that the user logs as ``loss`` is left out if the
        training job reports the loss of its steps, too: that is the curve of this name.
        """
        if training not in self._times:
            return
        for text in rows[-_MOST_ROWS:]:
            row = parse_row(text)
            if row is None:
                continue
            values = {
                name: value for name, value in row.values.items() if name != "loss" or training not in self._with_loss
            }
            if chosen := self.choose(time, training, values):
                yield row.step, chosen


@dataclass(frozen=True)
class JournalEntry:
    """One row: at `time` (seconds since the epoch), an event of `kind` happened to `subject`."""

    time: float
    kind: str
    subject: str
    detail: dict[str, Any]

    @property
    def record(self) -> Record | None:
        """The entry as a record; ``None`` if this version does not know its kind."""
        return record_of(self.kind, self.subject, self.detail)


class Journal:
    """The journal of a run: written by one thread, readable at any time by any process (write-ahead log).

    Entries are kept in memory until `commit`. If they cannot be written, e.g. because the disk is full, they stay in
    memory, up to a limit, and are written once that is possible again: a journal failure never ends a run.

    Parameters
    ----------
    path
        The file; made private to the user.
    clock
        Monotonic clock in seconds, for the pauses between attempts to write.
    observe
        Called with each record; must not block.

    Raises
    ------
    InvalidInput
        The file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[Record], None] = lambda _record: None,
    ) -> None:
        self.path = path
        self._observe = observe
        self._clock = clock
        self._entries: deque[tuple[float, str, str, str]] = deque()
        self._progress: dict[str, tuple[float, Progress]] = {}
        self._samples = ValueSamples()
        self._dropped = 0
        self._failures = 0
        self._retry_at = self._progress_at = 0.0
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            os.fchmod(descriptor, 0o600)  # SQLite gives its log the same mode
            os.close(descriptor)
            with contextlib.ExitStack() as on_error:
                self._database = sqlite3.connect(path, check_same_thread=False)
                on_error.callback(self._database.close)
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute("PRAGMA synchronous=NORMAL")
                self._database.executescript(_SCHEMA)
                self._database.commit()
                on_error.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise InvalidInput(
                f"cannot create the journal {path}: {error}; choose a run directory with free space"
            ) from error

    def write(self, time: float, record: Record) -> None:
        """Append a record; durable after the next `commit` that succeeds."""
        self._observe(record)
        if len(self._entries) >= _MOST_KEPT:
            self._entries.popleft()
            self._dropped += 1
        detail = dict(vars(record))
        subject = detail.pop("subject")
        self._entries.append((time, type_name(type(record)), subject, _as_json(detail)))

    def keep_progress(self, time: float, training: str, progress: Progress) -> None:
        """Replace the last progress report of a training job: reports are too frequent to keep all.

        A sample of their losses is kept.
        """
        self._progress[training] = (time, progress)
        self._samples.admit(training)
        if progress.loss is not None and (kept := self._samples.choose_loss(time, training, progress.loss)):
            self.write(time, record.ValuesSampled(training, progress.step, kept))

    def keep_values(self, time: float, training: str, rows: Sequence[str]) -> None:
        """Keep a sample of the values that a training job has logged; `rows` as in `protocol.reports.Logged`."""
        for step, kept in self._samples.choose_rows(time, training, rows):
            self.write(time, record.ValuesSampled(training, step, kept))

    def commit(self, *, all_progress: bool = True) -> None:
        """Make the entries visible to readers; on failure, log a warning and retry later.

        Without `all_progress`, progress reports are written once a second: a hundred training jobs report twice.
        """
        spared = not all_progress and self._clock() < self._progress_at
        if not (self._entries or (self._progress and not spared)) or self._clock() < self._retry_at:
            return
        progress = {} if spared else self._progress
        try:
            self._flush(progress)
        except sqlite3.Error as error:  # full disk, I/O error, lost mount, lock: not the run's fault
            self._failures += 1
            self._retry_at = self._clock() + min(2.0**self._failures, _LONGEST_PAUSE)
            if self._failures == 1:
                logger.warning("cannot write the journal %s: %s; trying again", self.path, error)
            return
        if self._failures:
            logger.warning("the journal %s can be written again; %d entries were lost", self.path, self._dropped)
        self._failures = self._dropped = 0
        self._entries.clear()
        if not spared:
            self._progress.clear()
            self._progress_at = self._clock() + _PROGRESS_PAUSE

    def close(self) -> None:
        """Commit and close."""
        self._retry_at = 0.0
        self.commit()
        with contextlib.suppress(sqlite3.Error):  # logged above
            self._database.close()

    def _flush(self, progress: Mapping[str, tuple[float, Progress]]) -> None:
        with self._database:
            self._database.executemany(
                "INSERT INTO event (time, kind, subject, detail) VALUES (?, ?, ?, ?)", self._entries
            )
            self._database.executemany(
                "INSERT OR REPLACE INTO progress (training, time, detail) VALUES (?, ?, ?)",
                [(training, time, _as_json(vars(report))) for training, (time, report) in progress.items()],
            )


def _as_json(detail: Mapping[str, Any]) -> str:
    return json.dumps(detail, default=asdict)  # `asdict` of the whole would copy each list of nodes


def read_journal(path: Path, after: int = 0) -> Iterator[tuple[int, JournalEntry]]:
    """Yield (id, entry) pairs with an id greater than `after`, in order.

    Raises
    ------
    OSError, sqlite3.Error
        It cannot be read.
    ValueError
        An entry is damaged.
    """
    with _opened(path) as reading:
        rows = reading.connection.execute(
            "SELECT id, time, kind, subject, detail FROM event WHERE id > ? ORDER BY id", (after,)
        )
        for number, time, kind, subject, detail in _in_order(reading, rows):
            yield number, JournalEntry(time, kind, subject, parse_stored(detail))


def _in_order(reading: DatabaseReading, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows whose ids grow: a damaged file, in which they lie in a circle, would be read for ever."""
    last = 0
    for row in rows:
        if row[0] <= last:
            raise ValueError(f"entry {row[0]} follows entry {last}")
        last = row[0]
        yield row
        reading.restart()


def read_kinds(
    path: Path, kinds: Sequence[type[Record]], after: int = 0, upto: int = _LAST_ID
) -> Iterator[JournalEntry]:
    """Yield the entries of some kinds of records, with ids in ``(after, upto]``, without reading the others."""
    names = [type_name(kind) for kind in kinds]
    places = ", ".join("?" * len(names))
    where = f"kind IN ({places}) AND id > ? AND id <= ?"
    query = f"SELECT id, time, kind, subject, detail FROM event WHERE {where} ORDER BY id"  # noqa: S608 - only ?
    with _opened(path) as reading:
        rows = reading.connection.execute(query, (*names, after, upto))
        for _number, time, kind, subject, detail in _in_order(reading, rows):
            yield JournalEntry(time, kind, subject, parse_stored(detail))


def last_record(path: Path, kind: type[Record], containing: str = "") -> Record | None:
    """Return the last record of a class whose JSON object contains a text, without reading the others."""
    with _opened(path) as reading:
        row = reading.connection.execute(
            "SELECT time, kind, subject, detail FROM event WHERE kind = ? AND instr(detail, ?) "
            "ORDER BY id DESC LIMIT 1",
            (type_name(kind), containing or "{"),
        ).fetchone()
    if row is None:
        return None
    time, name, subject, detail = row
    return JournalEntry(time, name, subject, parse_stored(detail)).record


def newest_entry(path: Path) -> int:
    """Return the id of the newest entry; 0 if there is none."""
    with _opened(path) as reading:
        return int(reading.connection.execute("SELECT COALESCE(MAX(id), 0) FROM event").fetchone()[0])


def newest_report(path: Path) -> float:
    """Return the time of the newest progress report, seconds since the epoch; 0.0 if there is none."""
    with _opened(path) as reading:
        return float(reading.connection.execute("SELECT COALESCE(MAX(time), 0.0) FROM progress").fetchone()[0])


def read_progress(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last progress report of each training job: name -> report."""
    with _opened(path) as reading:
        rows = reading.connection.execute("SELECT training, detail FROM progress").fetchall()
    return {training: parse_stored(detail) for training, detail in rows}


@contextmanager
def _opened(path: Path) -> Iterator[DatabaseReading]:
    """Open a journal for reading; a file of another kind or owner is refused as a damaged one is."""
    try:
        with open_for_reading(path) as reading:
            yield reading
    except (InvalidInput, OSError) as error:
        raise sqlite3.OperationalError(str(error)) from None
