"""Databases are read without a change to anything, whoever made them; what never ends, ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import freetrain_parsl
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.storage.owned_files import LARGEST_OF_OTHERS
from freetrain_parsl.storage.read_only_database import PrivateCopies, open_for_reading, seen_state
from tests.clock import Clock
from tests.foreign_runs import add_hot_journal, as_two_users, change, give

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDLESS = (
    "CREATE VIEW endless AS WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) "
    "SELECT i FROM c WHERE i < 0;"
)

LIES = (  # what this says is not what the object is
    "PRAGMA writable_schema = ON; "
    "INSERT INTO sqlite_master VALUES ('table', 'v', 'v', 0, 'CREATE VIEW v AS SELECT 1 AS x');"
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def copies(clock: Clock) -> Iterator[PrivateCopies]:
    return PrivateCopies(clock, clock.sleep)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "a.sqlite"
    path.parent.mkdir(mode=0o755)
    change(path, "CREATE TABLE t (x); INSERT INTO t VALUES ('one')")
    return path


def rows(path: Path, copies: PrivateCopies | None = None) -> list[str]:
    with open_for_reading(path, copies or PrivateCopies()) as reading:
        return [row[0] for row in reading.connection.execute("SELECT x FROM t")]


@pytest.mark.parametrize("name", ["a%41b", "a?mode=rw&b=", "a#b"])
def test_a_path_may_have_characters_of_uris(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    path = tmp_path / name / f"{name}.sqlite"
    change(path, "CREATE TABLE t (x); INSERT INTO t VALUES ('one')")
    assert rows(path) == ["one"]


def test_what_a_journal_names_is_not_removed_when_a_database_is_read(database: Path, tmp_path: Path) -> None:
    victim = tmp_path / "results.txt"
    victim.write_text("five years of work")
    add_hot_journal(database, victim)
    with pytest.raises(InvalidInput, match=r"a.sqlite-journal names another file, which SQLite would remove"):
        rows(database)
    assert victim.exists()


@as_two_users
def test_what_a_journal_of_another_user_names_is_not_removed(
    database: Path, tmp_path: Path, copies: PrivateCopies
) -> None:
    victim = tmp_path / "results.txt"
    victim.write_text("five years of work")
    add_hot_journal(database, victim)
    give(database.parent)
    before = sorted(database.parent.iterdir())
    with pytest.raises(InvalidInput, match="has an unfinished transaction, which only its owner can finish"):
        rows(database, copies)
    assert victim.exists()
    assert sorted(database.parent.iterdir()) == before


def test_a_database_is_read_whose_writer_was_killed_in_the_middle_of_a_commit(database: Path) -> None:
    """The change is not seen, and left to the next writer."""
    writer = (
        "import os, signal, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('PRAGMA cache_size = 1')\n"  # so pages are written before the commit
        "database.execute('BEGIN')\n"
        "for number in range(2000):\n"
        "    database.execute('INSERT INTO t VALUES (?)', ('x' * 500,))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    size = database.stat().st_size
    done = subprocess.run([sys.executable, "-c", writer, str(database)], check=False)
    assert done.returncode == -signal.SIGKILL
    journal = database.with_name("a.sqlite-journal")
    content = journal.read_bytes()
    assert database.stat().st_size > size, "nothing was written, so nothing has to be undone"
    assert rows(database) == ["one"]
    assert journal.read_bytes() == content
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (1,)


@as_two_users
def test_a_database_of_another_user_is_read_from_a_copy_that_is_renewed_now_and_then(
    database: Path, copies: PrivateCopies, clock: Clock
) -> None:
    give(database.parent)
    before = sorted(database.parent.iterdir())
    assert rows(database, copies) == ["one"]
    seen = seen_state(database, copies)
    change(database, "INSERT INTO t VALUES ('two')")
    assert rows(database, copies) == ["one"]
    assert seen_state(database, copies) == seen, "a reader that waits for a change would never see it"
    clock.now += 10
    assert seen_state(database, copies) != seen
    assert rows(database, copies) == ["one", "two"]
    assert sorted(database.parent.iterdir()) == before


@as_two_users
def test_the_write_ahead_log_of_another_user_is_read(database: Path, copies: PrivateCopies) -> None:
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO t VALUES ('two')")
        writer.commit()
        give(database.parent)
        assert rows(database, copies) == ["one", "two"]


def test_copies_are_removed(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    database.chmod(0o666)
    kept = PrivateCopies()
    assert rows(database, kept) == ["one"]
    assert len(list(tmp_path.glob("freetrain-copy-*"))) == 1
    del kept
    assert list(tmp_path.glob("freetrain-copy-*")) == []


def test_a_copy_of_a_process_that_was_killed_is_removed_by_the_next_one(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.chmod(0o666)
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from freetrain_parsl.storage.read_only_database import open_for_reading\n"
        "with open_for_reading(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(freetrain_parsl.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script, str(database)], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("freetrain-copy-*")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = PrivateCopies()
    rows(database, kept)
    rows(database, PrivateCopies())  # that of a living one is not removed
    (own,) = tmp_path.glob("freetrain-copy-*")
    assert own != left
    assert rows(database, kept) == ["one"]


@pytest.mark.parametrize(
    "script",
    [
        ENDLESS,
        "CREATE TRIGGER odd AFTER INSERT ON t BEGIN DELETE FROM t; END;",
        "CREATE TABLE g (x, y AS (x || x));",
        LIES,
    ],
)
def test_views_triggers_and_computed_columns_are_refused(database: Path, script: str) -> None:
    change(database, script)
    with pytest.raises(sqlite3.DatabaseError, match=r"which is not a plain table|malformed database schema"):
        rows(database)


def test_a_query_to_a_database_of_others_has_a_time_limit(database: Path, clock: Clock) -> None:
    database.chmod(0o666)

    def later() -> float:
        clock.now += 0.01
        return clock.now

    endless = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT i FROM c WHERE i < 0"
    with open_for_reading(database, clock=later) as reading, pytest.raises(sqlite3.OperationalError, match="interrupt"):
        reading.connection.execute(endless).fetchall()


def test_a_text_of_others_has_a_largest_length(database: Path) -> None:
    change(database, "INSERT INTO t VALUES (?)", "x" * (17 << 20))
    assert len(rows(database)) == 2
    database.chmod(0o666)
    with pytest.raises(sqlite3.DatabaseError, match="it has a text of 17,825,792 bytes"):
        rows(database)


def test_a_database_of_others_that_is_too_large_is_not_copied(database: Path) -> None:
    database.chmod(0o666)
    os.truncate(database, LARGEST_OF_OTHERS + 1)
    with pytest.raises(InvalidInput, match="bytes; at most 268,435,456 are read"):
        rows(database)


def test_a_pipe_and_a_link_are_refused(tmp_path: Path, database: Path) -> None:
    pipe, link = tmp_path / "pipe.sqlite", tmp_path / "link.sqlite"
    os.mkfifo(pipe)
    link.symlink_to(database)
    with pytest.raises(InvalidInput, match="is a pipe, not a regular file"):
        rows(pipe)
    with pytest.raises(InvalidInput, match="is a symbolic link, not a regular file"):
        rows(link)


def test_only_writers_open_a_database_otherwise() -> None:
    """Whoever shows something opens a database by `open_for_reading`."""
    package = Path(freetrain_parsl.__file__).parent
    calling = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "sqlite3.connect(" in path.read_text("utf-8")
    }
    writers = {"campaign/store.py", "executor/journal.py"}
    assert calling == {*writers, "storage/read_only_database.py"}
    assert (package / "executor" / "journal.py").read_text("utf-8").count("sqlite3.connect(") == 1
