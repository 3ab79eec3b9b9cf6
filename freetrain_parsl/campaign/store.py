"""The state of a campaign's run: one SQLite file in the run directory, read and written from any shell.

It uses a rollback journal, not a write-ahead log: the driver may be on one login node and ``freetrain status`` on
another, and a write-ahead log works on one host only. Writes are rare: a heartbeat every few seconds.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.storage.staging import sync_directory, sync_name
from freetrain_parsl.strict_yaml import shown
from freetrain_parsl.texts import storable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["DATABASE", "DriverRecord", "RunStore", "StateUnreadable", "TrainingRecord", "plain_scalar"]

DATABASE = "campaign.sqlite"

_VERSION = 2
_JOURNAL_DEPTH = 4  # parsl/000/freetrain/journal.sqlite
_BUSY = 30.0  # seconds to wait for another process's lock
_DEEPEST_RESULT = 100  # containers in one another that are kept as JSON
_LONGEST_RESULT = 200_000_000  # characters; SQLite takes 1e9 bytes
_WITHOUT_DRIVER = (  # what they waited for was the driver's business
    "UPDATE training SET state = 'waiting', nodes = '[]', remark = NULL WHERE state IN ('waiting', 'running')"
)
_SCHEMA = """
CREATE TABLE fact (           -- what does not change: name, texts of both files, run id, …
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL       -- JSON
);
CREATE TABLE driver (         -- one row for each process that has driven the campaign
    id INTEGER PRIMARY KEY,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started INTEGER NOT NULL, -- of the process, clock ticks since the host's boot: distinguishes reused ids
    since REAL NOT NULL,      -- seconds since the epoch, here and below
    heartbeat REAL NOT NULL,
    ended REAL,               -- NULL while it runs, and for ever if it was killed
    how TEXT,                 -- finished, stopped, interrupted, failed
    job_prefix TEXT,
    journal TEXT
);
CREATE TABLE training (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    state TEXT NOT NULL,      -- waiting, running, finished, failed, cancelled
    share REAL,               -- of its samples that are done
    nodes TEXT NOT NULL,      -- JSON list: where it runs
    result TEXT,              -- of a finished one: JSON, or repr
    result_is_json INTEGER NOT NULL,
    error TEXT,               -- of one that waits: why its last run was interrupted
    remark TEXT,              -- what the user should know: what it waits for, that its result is an old one, …
    updated REAL NOT NULL
);
CREATE TABLE request (        -- from other shells
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,       -- 'stop', or 'cancel' and the name of a training
    time REAL NOT NULL
);
"""


class StateUnreadable(InvalidInput, sqlite3.OperationalError):
    """The state of a run cannot be read or written: a reader is told why in one line, a driver tries again."""


@dataclass(frozen=True)
class DriverRecord:
    """A process that drives, or drove, the campaign; see the table ``driver``."""

    id: int
    host: str
    pid: int
    started: int
    since: float
    heartbeat: float
    ended: float | None
    how: str | None
    job_prefix: str | None
    journal: str | None


@dataclass(frozen=True)
class TrainingRecord:
    """The state of a training of the campaign; see the table ``training``."""

    name: str
    state: str
    share: float | None
    nodes: tuple[str, ...]
    result: Any
    error: str | None
    remark: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Describe it for ``--json``."""
        return {**vars(self), "nodes": list(self.nodes)}


class RunStore:
    """The database of one run. Each call is one short transaction on its own connection, from any process.

    Parameters
    ----------
    directory
        The run directory.
    clock
        Returns seconds since the epoch.

    Raises
    ------
    InvalidInput
        The directory contains no campaign.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._path = directory / DATABASE
        self._clock = clock
        try:
            found = self._path.is_file()
        except OSError as error:  # belongs to another user, or its name is too long
            raise InvalidInput(f"{shown(directory)}: {error.strerror or error}") from None
        if not found:
            raise InvalidInput(f"{shown(directory)} is not a run directory of 'freetrain run': it has no {DATABASE}")
        version = self._one("PRAGMA user_version")[0]
        if version != _VERSION:
            raise InvalidInput(f"{self._path} is of another version of FreeTrain (format {version}, not {_VERSION})")

    @classmethod
    def create(
        cls,
        directory: Path,
        facts: Mapping[str, Any],
        trainings: Sequence[str],
        clock: Callable[[], float] = time.time,
    ) -> RunStore:
        """Create the database of a new run atomically, private to the user.

        Raises
        ------
        InvalidInput
            Another process creates, or has created, a run in this directory.
        """
        path = directory / DATABASE
        aside = path.with_suffix(".new")
        try:
            os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise InvalidInput(f"{shown(directory)}: another process creates a run there; give another one") from None
        with closing(sqlite3.connect(aside)) as database, database:
            database.executescript(_SCHEMA)
            database.executemany(
                "INSERT INTO fact VALUES (?, ?)", [(key, json.dumps(value)) for key, value in facts.items()]
            )
            database.executemany(
                "INSERT INTO training (name, position, state, nodes, result_is_json, updated) "
                "VALUES (?, ?, 'waiting', '[]', 0, ?)",
                [(name, position, clock()) for position, name in enumerate(trainings)],
            )
            database.execute(f"PRAGMA user_version = {_VERSION}")
        aside.rename(path)
        sync_directory(directory)  # it has to survive a power cut: it has the names of the jobs
        sync_name(directory)
        return cls(directory, clock)

    # Constants of the run.

    def fact(self, key: str, *default: Any) -> Any:
        """Return one of the constants with which the run was created; if it has none, the default, if there is one."""
        rows = self._rows("SELECT value FROM fact WHERE key = ?", key)
        return default[0] if default and not rows else json.loads(rows[0][0])

    # Drivers.

    def begin_driver(self, host: str, pid: int, started: int) -> int:
        """Register this process as the driver, and clear requests and running states of earlier drivers.

        Returns
        -------
        int
            Its number.
        """
        with self._transaction() as database:
            database.execute("DELETE FROM request")
            database.execute(_WITHOUT_DRIVER)
            now = self._clock()
            cursor = database.execute(
                "INSERT INTO driver (host, pid, started, since, heartbeat) VALUES (?, ?, ?, ?, ?)",
                (host, pid, started, now, now),
            )
        assert cursor.lastrowid is not None, "an INSERT has a row"
        return cursor.lastrowid

    def describe_driver(self, driver: int, job_prefix: str, journal: Path) -> None:
        """Record the prefix of its job names, before the first is submitted, and the path of its journal."""
        self._write("UPDATE driver SET job_prefix = ?, journal = ? WHERE id = ?", job_prefix, str(journal), driver)

    def beat(
        self,
        driver: int,
        trainings: Mapping[str, tuple[str, float | None, Sequence[str]]],
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        """Record a heartbeat and the state of the trainings.

        Parameters
        ----------
        driver
            Its number.
        trainings
            Name -> state, share done, nodes.
        remarks
            Name -> remark for the user; trainings without a remark are omitted.
        """
        now = self._clock()
        rows = [
            (state, share, json.dumps(list(nodes)), storable((remarks or {}).get(name, "")) or None, now, name)
            for name, (state, share, nodes) in trainings.items()
        ]
        with self._transaction() as database:
            database.execute("UPDATE driver SET heartbeat = ? WHERE id = ?", (now, driver))
            database.executemany(
                "UPDATE training SET state = ?, share = COALESCE(?, share), nodes = ?, remark = ?, updated = ? "
                "WHERE name = ? AND state IN ('waiting', 'running')",
                rows,
            )

    def end_driver(self, driver: int, how: str) -> None:
        """Record that the driver ends cleanly; running trainings become waiting."""
        with self._transaction() as database:
            database.execute("UPDATE driver SET ended = ?, how = ? WHERE id = ?", (self._clock(), how, driver))
            database.execute(_WITHOUT_DRIVER)

    def drivers(self) -> list[DriverRecord]:
        """Return all drivers, the first one first."""
        return [self._driver(row) for row in self._rows("SELECT * FROM driver ORDER BY id")]

    def last_driver(self) -> DriverRecord | None:
        """Return the last driver."""
        row = self._rows("SELECT * FROM driver ORDER BY id DESC LIMIT 1")
        return self._driver(row[0]) if row else None

    def _driver(self, row: Sequence[Any]) -> DriverRecord:
        """Return a driver, with the place of its journal if the run directory was moved or copied."""
        driver = DriverRecord(*row)
        if driver.journal is None:
            return driver
        here = self.directory.joinpath(*Path(driver.journal).parts[-_JOURNAL_DEPTH:])
        return replace(driver, journal=str(here)) if here.exists() else driver

    def job_prefixes(self) -> list[str]:
        """Return the prefixes of the job names of all its drivers."""
        return [row[0] for row in self._rows("SELECT DISTINCT job_prefix FROM driver WHERE job_prefix IS NOT NULL")]

    # Trainings.

    def trainings(self) -> list[TrainingRecord]:
        """Return all trainings in campaign order."""
        rows = self._rows(
            "SELECT name, state, share, nodes, result, result_is_json, error, remark FROM training ORDER BY position"
        )
        return [
            TrainingRecord(
                name,
                state,
                share,
                tuple(json.loads(nodes)),
                json.loads(result) if plain else result,
                error,
                remark,
            )
            for name, state, share, nodes, result, plain, error, remark in rows
        ]

    def training(self, name: str) -> TrainingRecord:
        """Return one training.

        Raises
        ------
        InvalidInput
            There is none of that name.
        """
        trainings = {item.name: item for item in self.trainings()}
        if name not in trainings:
            raise InvalidInput(
                f"{self.directory} has no training {name[:80]!r}{did_you_mean(name[:80], trainings)}; "
                f"freetrain status {self.directory} lists them"
            )
        return trainings[name]

    def finish(self, name: str, result: object, remark: str = "") -> None:
        """Store the result of a training, as JSON if possible, else as its repr, and a remark."""
        text, plain = _stored(result)
        self._write(
            "UPDATE training SET state = 'finished', share = 1, nodes = '[]', result = ?, result_is_json = ?, "
            "error = NULL, remark = ?, updated = ? WHERE name = ?",
            text, plain, storable(remark) or None, self._clock(), name,
        )  # fmt: skip

    def fail(self, name: str, error: str, *, final: bool) -> None:
        """Record why a training failed; if the cause is external it is not `final`, and waits to be resumed."""
        self._write(
            "UPDATE training SET state = ?, nodes = '[]', error = ?, remark = NULL, updated = ? WHERE name = ?",
            "failed" if final else "waiting", storable(error), self._clock(), name,
        )  # fmt: skip

    def cancel(self, name: str) -> None:
        """Record that a training was cancelled, unless it had ended before."""
        self._write(
            "UPDATE training SET state = 'cancelled', nodes = '[]', error = NULL, remark = NULL, updated = ? "
            "WHERE name = ? AND state IN ('waiting', 'running')",
            self._clock(), name,
        )  # fmt: skip

    def retry_failed(self) -> None:
        """Set all failed trainings to waiting."""
        self._write("UPDATE training SET state = 'waiting', error = NULL WHERE state = 'failed'")

    def retry(self, name: str) -> None:
        """Set a failed or cancelled training to waiting; a waiting one is not an error.

        Raises
        ------
        InvalidInput
            No training has that name, or it has finished.
        """
        if self.training(name).state == "finished":
            raise InvalidInput(f"{name} has finished; there is nothing to retry")
        self._write(
            "UPDATE training SET state = 'waiting', error = NULL WHERE name = ? AND state IN ('failed', 'cancelled')",
            name,
        )

    def forget_interruptions(self) -> None:
        """Clear the errors of waiting trainings, which are retried."""
        self._write("UPDATE training SET error = NULL WHERE state = 'waiting'")

    # Requests.

    def request_stop(self) -> None:
        """Request the driver, in whichever process, to save everything and end."""
        self._write("INSERT INTO request (kind, time) VALUES ('stop', ?)", self._clock())

    def request_cancel(self, name: str) -> None:
        """Request the driver to save and end one training.

        Raises
        ------
        InvalidInput
            The training does not exist, or it has ended.
        """
        state = self.training(name).state
        if state not in ("waiting", "running"):
            again = "" if state == "finished" else f"; to continue it: freetrain resume {self.directory} --retry {name}"
            raise InvalidInput(f"{name} has ended already: {state}{again}")
        self._write("INSERT INTO request (kind, time) VALUES (?, ?)", f"cancel {name}", self._clock())

    def cancellations(self) -> list[str]:
        """Return the trainings with a cancel request to the current driver."""
        rows = self._rows("SELECT DISTINCT kind FROM request WHERE kind LIKE 'cancel %'")
        return [row[0].removeprefix("cancel ") for row in rows]

    def stop_requested(self) -> bool:
        """Return whether the current driver has a stop request."""
        return bool(self._rows("SELECT 1 FROM request WHERE kind = 'stop' LIMIT 1"))

    # SQLite.

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            # Without the mode, a database that was removed would be made again, empty.
            name = f"{self._path.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(name, timeout=_BUSY, uri=True)) as database, database:
                yield database
        except sqlite3.Error as error:
            if not self._path.exists():
                raise StateUnreadable(f"{shown(self.directory)} was removed, or its {DATABASE}") from None
            raise StateUnreadable(f"{self._path} cannot be used: {error}") from None

    def _write(self, statement: str, *values: Any) -> None:
        with self._transaction() as database:
            database.execute(statement, values)

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._transaction() as database:
            return database.execute(query, values).fetchall()

    def _one(self, query: str, *values: Any) -> Any:
        return self._rows(query, *values)[0]


def plain_scalar(value: Any) -> Any:
    """Return a number of NumPy or torch as one of Python, and anything else as it is."""
    try:
        return value.item() if value.ndim == 0 else value
    except BaseException:  # noqa: BLE001 - the user's object may raise anything, as a tensor without data does
        return value


def _stored(result: object) -> tuple[str, bool]:
    """Return a result as JSON if possible, else as its repr, and whether it is JSON."""
    try:
        text, plain = json.dumps(result, allow_nan=False, default=_plain_scalar), True
        if _is_deep(result):  # its readers may have less of the stack left than this function
            text, plain = _repr(result), False
    except BaseException:  # noqa: BLE001 - methods of the user's objects may raise anything, as in `plain_scalar`
        text, plain = _repr(result), False
    if len(text) > _LONGEST_RESULT:  # else it would be tried again, and all trainings that end would wait for it
        text, plain = f"<{type(result).__name__}, whose representation has {len(text)} characters: too many>", False
    return text, plain


def _is_deep(value: object, left: int = _DEEPEST_RESULT) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return not left or any(_is_deep(part, left - 1) for part in parts)


def _repr(result: object) -> str:
    try:
        return storable(repr(result))
    except BaseException as error:  # noqa: BLE001 - of the user's object, as above
        return f"<{type(result).__name__}, whose representation fails: {type(error).__name__}>"


def _plain_scalar(value: Any) -> Any:
    if (plain := plain_scalar(value)) is value:
        raise TypeError(f"{type(value).__name__} is not JSON")
    return plain
