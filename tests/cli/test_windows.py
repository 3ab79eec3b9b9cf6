"""`freetrain windows`."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.windows import (
    format_closing,
    format_duration,
    format_hosts,
    window_rows,
    window_table,
    window_view,
    windows,
)
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.errors import BatchSystemError, ClusterGone
from freetrain_parsl.planning.model import Window, WindowKind
from freetrain_parsl.windows.base import Survey
from tests.cli.fixed_source import FixedSource, run_verb

SURVEY = Survey(
    100.0,
    (Window(("n1", "n2"), 90.0, 165.0, partition="main"), Window(("n7",), 40.0, None)),
    notes=("job 9: eligible without a planned start",),
)


@pytest.fixture
def invoke(monkeypatch):
    """Run the verb with the test's own runtime directory, and without a batch system on PATH."""
    directory = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("PATH", str(directory))
    app = typer.Typer()
    app.command()(windows)
    yield lambda *arguments: CliRunner().invoke(app, arguments)
    shutil.rmtree(directory)


@pytest.fixture
def rounds(monkeypatch):
    """Limit the rounds of `--watch`; return its pauses."""

    def arrange(number: int) -> list[float]:
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == number:
                raise KeyboardInterrupt

        monkeypatch.setattr(time, "sleep", pause)
        return pauses

    return arrange


def test_without_a_cluster_it_says_so_in_one_line(invoke):
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr == (
        "freetrain windows: no embedded cluster is running; a run at a local site starts one, and ends it\n"
    )


@pytest.mark.smoke
@pytest.mark.cluster
def test_it_shows_the_windows_of_the_cluster_that_runs(invoke, tmp_path):
    with EmbeddedCluster(tmp_path, nodes=3, name="site") as cluster:
        cluster.client.submit(["/bin/sleep", "60"], walltime=timedelta(minutes=1))
        table = invoke("--cluster", "site")
        rows = json.loads(invoke("--json").stdout)
    assert table.exit_code == 0
    assert "n[01-02]" in table.stdout
    (row,) = rows
    assert {key: row[key] for key in row if key != "opens"} == {
        "nodes": 2,
        "node_names": ["n01", "n02"],
        "closes": None,
        "kind": "backfill",
        "partition": "",
    }


def test_rows_are_plain_values():
    assert window_rows(SURVEY) == [
        {
            "nodes": 2,
            "node_names": ["n1", "n2"],
            "opens": 90.0,
            "closes": 165.0,
            "kind": "backfill",
            "partition": "main",
        },
        {"nodes": 1, "node_names": ["n7"], "opens": 40.0, "closes": None, "kind": "backfill", "partition": ""},
    ]


def test_the_kind_of_nodes_is_shown_where_there_are_several():
    kinds = tuple(replace(window, node_kind=kind) for window, kind in zip(SURVEY.windows, ("gpu", "cpu"), strict=True))
    several = replace(SURVEY, windows=kinds)
    assert [row["node_kind"] for row in window_rows(several)] == ["gpu", "cpu"]
    assert all("node_kind" not in row for row in window_rows(SURVEY))
    columns = {str(column.header): list(column.cells) for column in window_table(several).columns}
    assert columns["of kind"] == ["gpu", "cpu"]
    assert columns["for as long"] == ["2", "1"]  # of the same kind
    assert "of kind" not in {str(column.header) for column in window_table(SURVEY).columns}


def test_the_table_tells_how_long_each_window_lasts_and_how_many_nodes_last_as_long():
    table = window_table(SURVEY)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["nodes"] == ["2", "1"]
    assert cells["time left"] == ["0:01:05", ""]
    assert cells["for as long"] == ["3", "1"]
    assert cells["idle for"] == ["0:00:10", "0:01:00"]


@pytest.mark.parametrize("width", [60, 100])
def test_on_terminals_of_any_width_counts_and_times_are_whole(width):
    """Narrow ones omit columns instead of truncating words."""
    console = Screen(width=width)
    with console.capture() as captured:
        console.print(window_view(SURVEY, "Slurm, partition main", width))
    text = captured.get()
    assert "…" not in text
    for piece in ("Slurm, partition main: 3 idle nodes at", "0:01:05", "not planned", "n[1-2]", "note: job 9"):
        assert piece in text
    assert ("idle for" in text) == (width > 80)
    assert max(map(len, text.splitlines())) <= width


def test_without_windows_it_says_so():
    console = Screen(width=80)
    with console.capture() as captured:
        console.print(window_view(Survey(0.0), "PBS", 80))
    assert captured.get().startswith("PBS: no idle nodes at ")
    assert len(captured.get().splitlines()) == 1


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (Window(("a",), 0.0, None), "not planned"),
        (Window(("a",), 0.0, None, WindowKind.PREEMPTIBLE), "any time"),
    ],
)
def test_an_unknown_closing_says_what_is_to_be_expected(window, text):
    assert format_closing(window, 0.0) == text


def test_a_closing_on_another_day_has_its_date():
    near, far = (format_closing(Window(("a",), 0.0, closes), 0.0) for closes in (80000.0, 90000.0))
    assert (len(near), len(far)) == (len("22:13:20"), len("1970-01-02 01:00"))


def test_long_lists_of_nodes_may_be_broken_between_names():
    assert format_hosts(["a1", "a2", "b1"]).plain == "a[1-2], b1"


def test_the_list_for_programs_is_the_same_windows(monkeypatch):
    result = run_verb(monkeypatch, windows, FixedSource(SURVEY), "--json")
    assert json.loads(result.stdout) == window_rows(SURVEY)


def test_a_watch_asks_again_until_it_is_interrupted(monkeypatch, rounds):
    pauses, source = rounds(3), FixedSource(SURVEY, Survey(101.0))
    result = run_verb(monkeypatch, windows, source, "--watch", "5")
    assert (result.exit_code, pauses, len(source.asked)) == (0, [5, 5, 5], 3)
    assert "no idle nodes" in result.stdout


def test_a_watch_for_programs_prints_a_line_a_round(monkeypatch, rounds):
    rounds(2)
    result = run_verb(monkeypatch, windows, FixedSource(SURVEY, Survey(101.0)), "--watch", "5", "--json")
    assert [len(json.loads(line)) for line in result.stdout.splitlines()] == [2, 0]


def test_a_watch_outlives_a_batch_system_that_does_not_answer_once(monkeypatch, rounds):
    rounds(3)
    source = FixedSource(SURVEY, BatchSystemError("squeue did not answer within 30 s"), SURVEY)
    result = run_verb(monkeypatch, windows, source, "--watch", "5")
    assert (result.exit_code, len(source.asked)) == (0, 3)


def test_a_watch_ends_with_a_cluster_that_is_gone(monkeypatch, rounds):
    rounds(9)
    result = run_verb(monkeypatch, windows, FixedSource(SURVEY, ClusterGone("it has ended")), "--watch", "5")
    assert (result.exit_code, result.stderr) == (2, "freetrain windows: it has ended\n")


def test_a_batch_system_that_others_use_is_not_asked_too_often(monkeypatch):
    source = FixedSource(SURVEY)
    result = run_verb(monkeypatch, windows, source, "--watch", "1")
    assert (result.exit_code, source.asked) == (2, [])
    assert result.stderr == (
        "freetrain windows: --watch 1: Slurm, default partition is shared; the shortest interval is 2 s\n"
    )


def test_a_batch_system_that_does_not_answer_is_one_line(monkeypatch):
    result = run_verb(monkeypatch, windows, FixedSource(BatchSystemError("sinfo failed: no route")))
    assert (result.exit_code, result.stderr) == (2, "freetrain windows: sinfo failed: no route\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (90061, "1-1:01:01")]
)
def test_lengths_of_time_are_written_as_batch_systems_do(seconds, text):
    assert format_duration(seconds) == text
