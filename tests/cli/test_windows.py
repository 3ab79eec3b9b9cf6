"""`freetrain windows`."""

from __future__ import annotations

import json
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from freetrain_parsl.cli.windows import format_duration, window_rows, window_table, windows
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.planning.model import Window
from freetrain_parsl.windows.base import Survey


@pytest.fixture
def invoke(monkeypatch):
    """Run the verb with a runtime directory of the test's own."""
    directory = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    app = typer.Typer()
    app.command()(windows)
    yield lambda *arguments: CliRunner().invoke(app, arguments)
    shutil.rmtree(directory)


def test_without_a_cluster_it_says_so_in_one_line(invoke):
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr == "freetrain windows: no embedded cluster of yours is running\n"


@pytest.mark.cluster
def test_it_shows_the_windows_of_the_cluster_that_runs(invoke, tmp_path):
    with EmbeddedCluster(tmp_path, nodes=3, name="site") as cluster:
        cluster.client.submit(["sleep", "60"], walltime=timedelta(minutes=1))
        table = invoke("--cluster", "site")
        rows = json.loads(invoke("--json").stdout)
    assert table.exit_code == 0
    assert "n01,n02" in table.stdout
    (row,) = rows
    assert {key: row[key] for key in row if key != "opens"} == {
        "nodes": 2,
        "node_names": ["n01", "n02"],
        "closes": None,
        "kind": "backfill",
        "partition": "",
    }


def test_rows_are_plain_values():
    survey = Survey(100.0, (Window(("a", "b"), 90.0, 160.0),))
    assert window_rows(survey) == [
        {
            "nodes": 2,
            "node_names": ["a", "b"],
            "opens": 90.0,
            "closes": 160.0,
            "kind": "backfill",
            "partition": "",
        }
    ]


def test_the_table_tells_how_long_each_window_lasts():
    table = window_table(Survey(100.0, (Window(("a", "b"), 90.0, 165.0), Window(("c",), 40.0, None))))
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["2", "1"]
    assert cells[1] == ["0:01:05", "no end known"]
    assert cells[3] == ["0:00:10", "0:01:00"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (90061, "1-1:01:01")]
)
def test_lengths_of_time_are_written_as_batch_systems_do(seconds, text):
    assert format_duration(seconds) == text
