"""Parsl's monitoring tables are filled for training jobs and blocks as for any other executor."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def test_task_try_and_block_tables_are_filled(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="Parsl's monitoring needs sqlalchemy: pip install 'parsl[monitoring]'")
    subprocess.run(
        [sys.executable, "-m", "tests.executor.monitored_script", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=100,
    )
    with closing(sqlite3.connect(tmp_path / "monitoring.db")) as database:
        tasks = database.execute("SELECT task_func_name, task_time_returned FROM task").fetchall()
        states = {row[0] for row in database.execute("SELECT task_status_name FROM status")}
        blocks = [row[0] for row in database.execute("SELECT status FROM block ORDER BY timestamp")]
        executors = {row[0] for row in database.execute("SELECT task_executor FROM try")}
    assert [name for name, _ in tasks] == ["train"]
    assert tasks[0][1] is not None
    assert {"pending", "launched", "running", "exec_done"} <= states
    assert executors == {"freetrain"}
    assert blocks[:2] == ["PENDING", "RUNNING"]
