"""Run directories as another user leaves them in a shared directory."""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from freetrain_parsl.campaign.store import DATABASE, RunStore

BOB = 65534

as_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

FACTS: dict[str, Any] = {
    "name": "camp",
    "run_id": "00c0ffee",
    "created": 1e12,
    "campaign_file": "c.yaml",
    "campaign_text": "name: camp\ntrainings:\n  - app: job.py:train\n    name: t\n",
    "site_file": "s.yaml",
    "site_text": "site: x\nsystem: slurm\nblock: {partition: p}\n",
    "variables": {},
    "assignment": None,
}


def plant(directory: Path, **facts: Any) -> Path:
    """Make a run directory of this user; see `give`."""
    directory.mkdir(mode=0o755, parents=True)
    RunStore.create(directory, {**FACTS, **facts}, ["t"])
    (directory / DATABASE).chmod(0o644)
    return directory


def give(directory: Path, user: int = BOB) -> Path:
    """Give a directory, and what is in it, to another user."""
    for path in (directory, *directory.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)
    return directory


def change(database: Path, script: str, *values: Any) -> None:
    """Execute a statement, or a script without values."""
    with closing(sqlite3.connect(database)) as connection, connection:
        if values:
            connection.execute(script, values)
        else:
            connection.executescript(script)


def add_driver(directory: Path, **values: Any) -> None:
    """Add a driver that has ended."""
    row = {
        "host": "x",
        "pid": 1,
        "started": 1,
        "since": 1.0,
        "heartbeat": 1.0,
        "ended": 1.0,
        "how": "stopped",
        "job_prefix": None,
        "journal": None,
        **values,
    }
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    change(directory / DATABASE, f"INSERT INTO driver ({names}) VALUES ({marks})", *row.values())


def add_hot_journal(database: Path, target: Path) -> None:
    """Add a rollback journal that names `target` as super-journal: SQLite removes it when it may write here."""
    (page,) = struct.unpack(">H", database.read_bytes()[16:18])
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(target)
    head = magic + struct.pack(">IIIII", 0, 1, database.stat().st_size // page, 512, page)
    tail = struct.pack(">I", 0x40000000 // page + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    Path(f"{database}-journal").write_bytes(head.ljust(512, b"\0") + tail)
