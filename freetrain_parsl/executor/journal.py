"""The journal: what the driver saw, decided and did, in a SQLite file in the run directory."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Entry", "Journal", "read_journal", "read_progress"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS event (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,      -- seconds since the epoch
    kind TEXT NOT NULL,      -- a word, such as 'fragment_started'
    subject TEXT NOT NULL,   -- the training, block or node that it is about
    detail TEXT NOT NULL     -- JSON object
);
CREATE TABLE IF NOT EXISTS progress (
    training TEXT PRIMARY KEY,
    time REAL NOT NULL,      -- of its last report, seconds since the epoch
    detail TEXT NOT NULL     -- JSON object: training.terms.Progress
);
"""


@dataclass(frozen=True)
class Entry:
    """One row: at `time` (seconds since the epoch), `kind` happened to `subject`."""

    time: float
    kind: str
    subject: str
    detail: dict[str, Any]


class Journal:
    """Written by one thread; readable meanwhile by any process (write-ahead log).

    Parameters
    ----------
    path
        The file; made private to the user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        self._database.commit()

    def write(self, time: float, kind: str, subject: str, **detail: Any) -> None:
        """Append an entry; durable after the next `commit`."""
        self._database.execute(
            "INSERT INTO event (time, kind, subject, detail) VALUES (?, ?, ?, ?)",
            (time, kind, subject, json.dumps(detail)),
        )

    def keep_progress(self, time: float, training: str, progress: dict[str, Any]) -> None:
        """Replace the last progress report of a training: they come too often to keep all."""
        self._database.execute(
            "INSERT OR REPLACE INTO progress (training, time, detail) VALUES (?, ?, ?)",
            (training, time, json.dumps(progress)),
        )

    def commit(self) -> None:
        """Make what was written visible to readers."""
        if self._database.in_transaction:
            self._database.commit()

    def close(self) -> None:
        """Commit and close."""
        self.commit()
        self._database.close()


def read_journal(path: Path, after: int = 0) -> Iterator[tuple[int, Entry]]:
    """Yield (id, entry) pairs in order, those with an id greater than `after`."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows = database.execute("SELECT id, time, kind, subject, detail FROM event WHERE id > ? ORDER BY id", (after,))
        for number, time, kind, subject, detail in rows:
            yield number, Entry(time, kind, subject, json.loads(detail))
    finally:
        database.close()


def read_progress(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last progress report of each training, by name."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows = database.execute("SELECT training, detail FROM progress").fetchall()
    finally:
        database.close()
    return {training: json.loads(detail) for training, detail in rows}
