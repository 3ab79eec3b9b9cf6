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
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.stored_run import (
    DATABASE,
    VERSION,
    DriverRecord,
    StateUnreadable,
    StoredRun,
    TrainingRecord,
)
from freetrain_parsl.errors import DriverSuperseded, InvalidInput
from freetrain_parsl.storage.atomic_files import replace_file, sync_directory, sync_name
from freetrain_parsl.storage.owned_files import make_private, open_directory, require_own_directory
from freetrain_parsl.storage.posix import directory_name
from freetrain_parsl.storage.read_only_database import refuse_super_journal
from freetrain_parsl.storage.stored_json import is_deep
from freetrain_parsl.strict_yaml import shown
from freetrain_parsl.texts import storable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["DATABASE", "DriverRecord", "RunStore", "StateUnreadable", "TrainingRecord", "plain_scalar"]

_RESULTS = "results"  # directory in the run directory
_BUSY = 30.0  # seconds to wait for another process's lock
_LONGEST_RESULT = 1_000_000  # characters in the database, which every view reads; longer ones have a file
_WITHOUT_DRIVER = (  # what they waited for was the driver's business
    "UPDATE training SET state = 'waiting', nodes = '[]', remark = NULL WHERE state IN ('waiting', 'running')"
)
_SCHEMA = """
CREATE TABLE fact (           -- name, texts of both files, run id, …; the last driver's slots_per_node
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


class RunStore(StoredRun):
    """The database of one run of this user. Each call is one short transaction on its own connection, from any process.

    Parameters
    ----------
    directory
        The run directory.
    clock
        Returns seconds since the epoch.

    Raises
    ------
    InvalidInput
        The directory contains no campaign, or belongs to another user, or others may write it.
    """

    _driver_id: int | None = None  # that this process has begun

    def _prepare(self) -> None:
        """Refuse the run of another user: whoever opens its database to write it does what is in its journal."""
        if self.distrust.startswith("belongs to"):
            raise InvalidInput(
                f"{shown(self.directory)} {self.distrust}; only its owner can resume, stop, cancel, prune or clean it"
            )
        if self.distrust:
            raise InvalidInput(
                f"{shown(self.directory)} {self.distrust}, so its content may be theirs; if not, run: "
                f"chmod -R go-w {shown(self.directory)}"
            )

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
            Another process creates, or has created, a run in this directory, or it may be of others.
        """
        require_own_directory(directory, "give another directory")
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
            database.execute(f"PRAGMA user_version = {VERSION}")
        aside.rename(path)
        sync_directory(directory)  # it has to survive a power cut: it has the names of the jobs
        sync_name(directory)
        return cls(directory, clock)

    # Drivers.

    def begin_driver(self, host: str, pid: int, started: int, *, replaces: DriverRecord | None = None) -> int:
        """Register this process as the driver, and clear requests and running states of earlier drivers.

        From now on, all that earlier drivers write is refused with `DriverSuperseded`.

        Parameters
        ----------
        host, pid, started
            This process.
        replaces
            The last driver, as it was when it was found to have ended or died.

        Returns
        -------
        int
            Its number: the newest one drives the run.

        Raises
        ------
        InvalidInput
            That driver has shown a sign of life since, or another one has begun.
        """
        with self._transaction() as database:
            database.execute("BEGIN IMMEDIATE")
            row = database.execute("SELECT * FROM driver ORDER BY id DESC LIMIT 1").fetchone()
            if replaces is not None and row is not None and _unlike(DriverRecord(*row), replaces):
                other = DriverRecord(*row)
                raise InvalidInput(
                    f"{shown(self.directory)}: its driver runs on {other.host} (process {other.pid}); "
                    f"stop it first: freetrain stop {shown(self.directory)}"
                )
            database.execute("DELETE FROM request")
            database.execute(_WITHOUT_DRIVER)
            now = self._clock()
            cursor = database.execute(
                "INSERT INTO driver (host, pid, started, since, heartbeat) VALUES (?, ?, ?, ?, ?)",
                (host, pid, started, now, now),
            )
        assert cursor.lastrowid is not None, "an INSERT has a row"
        self._driver_id = cursor.lastrowid
        return cursor.lastrowid

    def check_driver(self) -> None:
        """Check that the driver that this process has begun is the newest one.

        Raises
        ------
        DriverSuperseded
            Another driver has begun since.
        StateUnreadable
            The database cannot be read for now.
        """
        with self._transaction() as database:
            self._refuse_superseded(database)

    def describe_driver(self, driver: int, job_prefix: str, journal: Path, slots_per_node: int = 1) -> None:
        """Record the prefix of its job names, before the first is submitted, and the path of its journal.

        `slots_per_node` is the number of slots of a node where jobs share nodes, 1 elsewhere; it is read with the
        nodes of the training jobs.
        """
        self._drive("UPDATE driver SET job_prefix = ?, journal = ? WHERE id = ?", job_prefix, str(journal), driver)
        self._drive("INSERT OR REPLACE INTO fact VALUES ('slots_per_node', ?)", json.dumps(slots_per_node))

    def beat(
        self,
        driver: int,
        trainings: Mapping[str, tuple[str, float | None, Sequence[str]]],
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        """Record a heartbeat and the state of the training jobs.

        Parameters
        ----------
        driver
            Its number.
        trainings
            Name -> state, share done, nodes.
        remarks
            Name -> remark for the user; training jobs without a remark are omitted.
        """
        now = self._clock()
        rows = [
            (state, share, json.dumps(list(nodes)), storable((remarks or {}).get(name, "")) or None, now, name)
            for name, (state, share, nodes) in trainings.items()
        ]
        with self._driving() as database:
            database.execute("UPDATE driver SET heartbeat = ? WHERE id = ?", (now, driver))
            database.executemany(
                "UPDATE training SET state = ?, share = COALESCE(?, share), nodes = ?, remark = ?, updated = ? "
                "WHERE name = ? AND state IN ('waiting', 'running')",
                rows,
            )

    def end_driver(self, driver: int, how: str) -> None:
        """Record that the driver ends cleanly; running training jobs become waiting."""
        with self._driving() as database:
            database.execute("UPDATE driver SET ended = ?, how = ? WHERE id = ?", (self._clock(), how, driver))
            database.execute(_WITHOUT_DRIVER)

    # Training jobs.

    def finish(self, name: str, result: object, remark: str = "") -> None:
        """Store the result of a training job that has not ended, as JSON if possible, else as its repr, and a remark.

        One of more than a million characters is written to a file in the run directory, which is named instead; bytes
        are written as they are: their repr is up to four times as long, and no other thread runs while it is made.
        """
        if isinstance(result, bytes) and len(result) > _LONGEST_RESULT:
            text, plain = self._in_file(name, result, f"bytes, {len(result):,} bytes", is_json=False), False
        else:
            text, plain = _stored(result)
            if len(text) > _LONGEST_RESULT:
                what = f"{type(result).__name__}, {len(text):,} characters"
                text, plain = self._in_file(name, text, what, is_json=plain), False
        self._drive(
            "UPDATE training SET state = 'finished', share = 1, nodes = '[]', result = ?, result_is_json = ?, "
            "error = NULL, remark = ?, updated = ? WHERE name = ? AND state IN ('waiting', 'running')",
            text, plain, storable(remark) or None, self._clock(), name,
        )  # fmt: skip

    def _in_file(self, name: str, content: str | bytes, what: str, *, is_json: bool) -> str:
        """Write a result to a file of its own, atomically and private to the user, and say where it is."""
        self.check_driver()
        suffix = "bin" if isinstance(content, bytes) else "json" if is_json else "txt"
        file = self.directory / _RESULTS / f"{directory_name(name)}.{suffix}"
        try:
            make_private(file.parent)
            replace_file(file, content if isinstance(content, bytes) else content.encode())
        except OSError as error:  # a full disk: tried again, as with the database
            raise StateUnreadable(f"the result of {name} cannot be written: {error.strerror or error}") from error
        return f"in {file.relative_to(self.directory)}: {what}"

    def fail(self, name: str, error: str, *, final: bool) -> None:
        """Record why a training job failed, unless it had ended before.

        If the cause is external it is not `final`: the training job waits to be resumed.
        """
        self._drive(
            "UPDATE training SET state = ?, nodes = '[]', error = ?, remark = NULL, updated = ? "
            "WHERE name = ? AND state IN ('waiting', 'running')",
            "failed" if final else "waiting", storable(error), self._clock(), name,
        )  # fmt: skip

    def cancel(self, name: str) -> None:
        """Record that a training job was cancelled, unless it had ended before."""
        self._drive(
            "UPDATE training SET state = 'cancelled', nodes = '[]', error = NULL, remark = NULL, updated = ? "
            "WHERE name = ? AND state IN ('waiting', 'running')",
            self._clock(), name,
        )  # fmt: skip

    def retry_failed(self) -> None:
        """Set all failed training jobs to waiting."""
        self._write("UPDATE training SET state = 'waiting', error = NULL WHERE state = 'failed'")

    def retry(self, name: str) -> None:
        """Set a failed or cancelled training job to waiting; a waiting one is not an error.

        Raises
        ------
        InvalidInput
            No training job has that name, or it has finished.
        """
        if self.training(name).state == "finished":
            raise InvalidInput(f"{name} has finished; there is nothing to retry")
        self._write(
            "UPDATE training SET state = 'waiting', error = NULL WHERE name = ? AND state IN ('failed', 'cancelled')",
            name,
        )

    def forget_interruptions(self) -> None:
        """Clear the errors of waiting training jobs, which are retried."""
        self._write("UPDATE training SET error = NULL WHERE state = 'waiting'")

    # Requests.

    def request_stop(self) -> None:
        """Request the driver, in whichever process, to save everything and end."""
        self._write("INSERT INTO request (kind, time) VALUES ('stop', ?)", self._clock())

    def request_cancel(self, name: str) -> None:
        """Request the driver to save and end one training job.

        Raises
        ------
        InvalidInput
            The training job does not exist, or it has ended.
        """
        state = self.training(name).state
        if state not in ("waiting", "running"):
            again = "" if state == "finished" else f"; to continue it: freetrain resume {self.directory} --retry {name}"
            raise InvalidInput(f"{name} has ended already: {state}{again}")
        self._write("INSERT INTO request (kind, time) VALUES (?, ?)", f"cancel {name}", self._clock())

    # SQLite.

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with open_directory(self.directory) as directory:
                refuse_super_journal(directory, DATABASE)
            # Without the mode, a database that was removed would be made again, empty.
            name = f"{self._path.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(name, timeout=_BUSY, uri=True)) as database, database:
                yield database
        except (OSError, sqlite3.Error) as error:
            raise self._unreadable(error) from None

    @contextmanager
    def _driving(self) -> Iterator[sqlite3.Connection]:
        """Write as the driver: in one transaction with the check that no other driver has begun."""
        with self._transaction() as database:
            database.execute("BEGIN IMMEDIATE")
            self._refuse_superseded(database)
            yield database

    def _refuse_superseded(self, database: sqlite3.Connection) -> None:
        """Refuse what a driver does after another one has begun; other processes are not affected."""
        row = database.execute("SELECT * FROM driver ORDER BY id DESC LIMIT 1").fetchone()
        if self._driver_id is None or row is None or (newest := DriverRecord(*row)).id == self._driver_id:
            return
        raise DriverSuperseded(
            f"{shown(self.directory)}: this driver (process {os.getpid()}) was suspended, or could not be seen to be "
            f"alive, and was replaced by process {newest.pid} on {newest.host}, which continues the run; "
            "this one ends without a change, and nothing is left to do"
        )

    def _drive(self, statement: str, *values: Any) -> None:
        with self._driving() as database:
            database.execute(statement, values)

    def _write(self, statement: str, *values: Any) -> None:
        with self._transaction() as database:
            database.execute(statement, values)

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._transaction() as database:
            return database.execute(query, values).fetchall()


def _unlike(driver: DriverRecord, before: DriverRecord) -> bool:
    """Return whether a driver is another one, or has shown a sign of life."""
    return (driver.id, driver.heartbeat, driver.ended) != (before.id, before.heartbeat, before.ended)


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
        if is_deep(result):  # its readers may have less of the stack left than this function
            text, plain = _repr(result), False
    except BaseException:  # noqa: BLE001 - methods of the user's objects may raise anything, as in `plain_scalar`
        text, plain = _repr(result), False
    return text, plain


def _repr(result: object) -> str:
    try:
        return storable(repr(result))
    except BaseException as error:  # noqa: BLE001 - of the user's object, as above
        return f"<{type(result).__name__}, whose representation fails: {type(error).__name__}>"


def _plain_scalar(value: Any) -> Any:
    if (plain := plain_scalar(value)) is value:
        raise TypeError(f"{type(value).__name__} is not JSON")
    return plain
