"""The state of a campaign's run, for reading: whoever made the run directory, reading changes nothing in it.

A run of another user, or one that others may write, is shown from a private copy.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.storage.owned_files import open_directory
from freetrain_parsl.storage.read_only_database import open_for_reading
from freetrain_parsl.storage.stored_json import parse_stored
from freetrain_parsl.strict_yaml import shown
from freetrain_parsl.windows.base import OUR_JOBS
from freetrain_parsl.windows.hostlist import show_units

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DATABASE", "VERSION", "DriverRecord", "StateUnreadable", "StoredRun", "TrainingRecord"]

DATABASE = "campaign.sqlite"

VERSION = 2

_JOURNAL_DEPTH = 4  # parsl/000/freetrain/journal.sqlite
_RUN_ID = re.compile(r"\w{1,64}")


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
    """The state of a training job of the campaign; see the table ``training``."""

    name: str
    state: str
    share: float | None
    nodes: tuple[str, ...]
    result: Any
    error: str | None
    remark: str | None = None
    where: str = ""
    """`nodes` in words, see `show_units`."""

    def as_json(self) -> dict[str, Any]:
        """Describe it for ``--json``."""
        return {**vars(self), "nodes": list(self.nodes)}


class StoredRun:
    """The state of one run. Each call is one short query on its own connection, from any process.

    Parameters
    ----------
    directory
        The run directory.
    clock
        Returns seconds since the epoch.

    Raises
    ------
    InvalidInput
        The directory contains no campaign, or none that can be read.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._path = directory / DATABASE
        self._clock = clock
        try:
            with open_directory(directory) as opened:
                self.distrust = opened.distrust(DATABASE)
                """Why the run may be of others: ``belongs to …``; empty if it is this user's."""
                self._owner = opened.owner
                found = opened.state_of(DATABASE) != (0, 0, 0)
        except (FileNotFoundError, NotADirectoryError):
            found = False
        except OSError as error:  # belongs to another user, or its name is too long
            raise InvalidInput(f"{shown(directory)}: {error.strerror or error}") from None
        if not found:
            why = f"it has no {DATABASE}" if directory.is_dir() else "there is no such directory"
            raise InvalidInput(f"{shown(directory)} is not a run directory of 'freetrain run': {why}")
        self._prepare()
        version = self._rows("PRAGMA user_version")[0][0]
        if version != VERSION:
            raise InvalidInput(f"{self._path} is of another version of FreeTrain (format {version}, not {VERSION})")

    def _prepare(self) -> None:
        """Refuse what must not be opened."""

    @property
    def notes(self) -> list[str]:
        """What a reader of the run should know, in lines."""
        return [f"{self.directory} {self.distrust}; it is shown from a copy"] if self.distrust else []

    # Constants of the run.

    def fact(self, key: str, *default: Any) -> Any:
        """Return one of the constants with which the run was created; if it has none, the default, if there is one.

        Raises
        ------
        StateUnreadable
            It has none, and there is no default.
        """
        rows = self._rows("SELECT value FROM fact WHERE key = ?", key)
        if not rows:
            if default:
                return default[0]
            raise StateUnreadable(f"{self._path} is damaged: it has no {key}")
        return self._parsed(rows[0][0], key)

    # Drivers.

    def drivers(self) -> list[DriverRecord]:
        """Return all drivers, the first one first."""
        return [self._driver(row) for row in self._rows("SELECT * FROM driver ORDER BY id")]

    def last_driver(self) -> DriverRecord | None:
        """Return the last driver."""
        row = self._rows("SELECT * FROM driver ORDER BY id DESC LIMIT 1")
        return self._driver(row[0]) if row else None

    def _driver(self, row: Sequence[Any]) -> DriverRecord:
        """Return a driver, with the place of its journal if the run directory was moved or copied."""
        try:
            driver = DriverRecord(*row)
        except TypeError:
            raise StateUnreadable(f"{self._path} is damaged: a driver has {len(row)} columns") from None
        number, host, pid, started, since, heartbeat, ended, how, prefix, journal = row
        types = [
            *(isinstance(item, int) for item in (number, pid, started)),
            *(isinstance(item, (int, float)) for item in (since, heartbeat, ended or 0.0)),
            *(isinstance(item, str) for item in (host, how or "", prefix or "", journal or "")),
        ]
        if not all(types) or "\0" in (journal or ""):
            raise StateUnreadable(f"{self._path} is damaged: driver {str(driver.id)[:20]} has values of other types")
        if driver.journal is None:
            return driver
        parts = Path(driver.journal).parts[-_JOURNAL_DEPTH:]
        here = self.directory.joinpath(*parts)
        if self.distrust:  # its database may name any file
            inside = not Path(*parts).is_absolute() and ".." not in parts and self._has_own(parts)
            return replace(driver, journal=str(here) if inside else None)
        return replace(driver, journal=str(here)) if here.exists() else driver

    def _has_own(self, parts: Sequence[str]) -> bool:
        """Return whether a path in the run directory has no links, and belongs to the directory's owner all the way."""
        place = self.directory
        for part in parts:
            place /= part
            try:
                facts = os.lstat(place)
            except OSError:
                return False
            if stat.S_ISLNK(facts.st_mode) or facts.st_uid != self._owner:
                return False
        return True

    def job_prefixes(self) -> list[str]:
        """Return the prefixes of the job names of all its drivers.

        Raises
        ------
        InvalidInput
            One is not a prefix of this run's jobs: jobs of anybody could begin with it.
        """
        rows = self._rows("SELECT DISTINCT job_prefix FROM driver WHERE job_prefix IS NOT NULL")
        prefixes = [str(row[0]) for row in rows]
        if not prefixes:
            return []
        run_id = self.fact("run_id")
        if not (isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)):
            raise InvalidInput(f"{self._path} has {str(run_id)[:40]!r} as run id; it was tampered with")
        ours = re.compile(rf"{re.escape(OUR_JOBS)}[^\s*?]+\.{re.escape(run_id)}\.")
        for prefix in prefixes:
            if not ours.fullmatch(prefix):
                raise InvalidInput(
                    f"{self._path} has {prefix[:60]!r} as the prefix of its jobs, not {OUR_JOBS}NAME.{run_id}.; it was "
                    "tampered with, and no job is cancelled"
                )
        return prefixes

    # Training jobs.

    def trainings(self) -> list[TrainingRecord]:
        """Return all training jobs in campaign order."""
        rows = self._rows(
            "SELECT name, state, share, nodes, result, result_is_json, error, remark FROM training ORDER BY position"
        )
        slots = self.fact("slots_per_node", 1)
        return [self._training(row, slots) for row in rows]

    def _training(self, row: tuple[Any, ...], slots_per_node: int) -> TrainingRecord:
        name, state, share, nodes, result, plain, error, remark = row
        held = self._parsed(nodes, "nodes")
        texts = (name, state, result or "", error or "", remark or "", *(held if isinstance(held, list) else [None]))
        if not isinstance(share, (int, float, type(None))) or not all(isinstance(item, str) for item in texts):
            raise StateUnreadable(f"{self._path} is damaged: training job {str(name)[:80]!r} has values of other types")
        if plain and result is not None:
            result = self._parsed(result, f"result of {name[:80]}")
        return TrainingRecord(name, state, share, tuple(held), result, error, remark, show_units(held, slots_per_node))

    def training(self, name: str) -> TrainingRecord:
        """Return one training job.

        Raises
        ------
        InvalidInput
            There is none of that name.
        """
        trainings = {item.name: item for item in self.trainings()}
        if name not in trainings:
            raise InvalidInput(
                f"{self.directory} has no training job {name[:80]!r}{did_you_mean(name[:80], trainings)}; "
                f"freetrain status {self.directory} lists them"
            )
        return trainings[name]

    # Requests.

    def cancellations(self) -> list[str]:
        """Return the training jobs with a cancel request to the current driver."""
        rows = self._rows("SELECT DISTINCT kind FROM request WHERE kind LIKE 'cancel %'")
        return [row[0].removeprefix("cancel ") for row in rows]

    def stop_requested(self) -> bool:
        """Return whether the current driver has a stop request."""
        return bool(self._rows("SELECT 1 FROM request WHERE kind = 'stop' LIMIT 1"))

    # SQLite.

    def _parsed(self, text: object, what: str) -> Any:
        try:
            return parse_stored(text)
        except ValueError as error:
            raise StateUnreadable(f"{self._path} is damaged: {what}: {error}") from None

    def _rows(self, query: str, *values: Any) -> list[Any]:
        try:
            with open_for_reading(self._path) as reading:
                return reading.connection.execute(query, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> StateUnreadable:
        if not self._path.exists():
            return StateUnreadable(f"{shown(self.directory)} was removed, or its {DATABASE}")
        return StateUnreadable(f"{self._path} cannot be used: {error}")
