"""`freetrain report`."""

from __future__ import annotations

import json
import sqlite3

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import DATABASE, RunStore
from freetrain_parsl.cli.commands import app
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.reports import Progress
from tests.cli.test_status import FACTS
from tests.report.test_node_time import BLOCK


@pytest.fixture
def run(tmp_path):
    """Make a run of two drivers, each with one block."""
    store = RunStore.create(tmp_path, FACTS, ["a", "b"])
    host, pid, started = own_identity()
    for number in (1, 2):
        driver = store.begin_driver(host, pid, started - number)
        path = tmp_path / f"journal-{number}.sqlite"
        journal = Journal(path)
        for time, written in BLOCK:
            journal.write(time, written)
        journal.write(50.0, record.BatchRequests("", 40.0, {"squeue": 20, "sbatch": 1}))
        journal.keep_progress(50.0, "t", Progress(0, 10 * number, 100 * number, None, slot_seconds=10.0 * number))
        journal.close()
        store.describe_driver(driver, "ft-", path)
        store.end_driver(driver, "finished")
    store.finish("a", 1.0)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_node_time_adds_up_over_drivers_and_progress_is_the_last(run):
    figures = json.loads(invoke(run, "--json").stdout)
    assert figures["held_node_seconds"] == sum(figures["node_seconds"].values()) == 160
    assert figures["node_seconds"]["training"] == 100
    assert (figures["returned_node_seconds"], figures["cut_short_node_seconds"]) == (0, 240)
    assert figures["requests"] == {"squeue": 40, "sbatch": 2}
    assert figures["requests_by_hour"] == [{"begin": 0.0, "counts": {"squeue": 40, "sbatch": 2}}]
    assert (figures["samples"], figures["useful_node_seconds"]) == (200, 20.0)
    assert figures["block_endings"] == {"preempted": 2}
    assert figures["trainings"] == {"finished": 1, "running": 0, "waiting": 1, "failed": 0, "cancelled": 0}
    assert (figures["drivers"], figures["begin"], figures["end"]) == (2, 0.0, 50.0)


def test_the_table_names_each_cause(run):
    result = invoke(run)
    assert result.exit_code == 0
    assert "sweep: 1 of 2 training jobs finished, 200 samples" in result.stdout
    for words in (
        "held by our blocks",
        "starting, until the workers are ready",
        "given back",
        "2: preempted",
        "40 squeue",
    ):
        assert words in result.stdout


def test_the_page_has_the_same_figures_and_loads_nothing(run, tmp_path):
    path = tmp_path / "report.html"
    assert invoke(run, "--page", path).exit_code == 0
    text = path.read_text()
    for words in ("0.0444 node-hours", "given back before the walltime", "0.0667", "62.5%", "squeue", "preempted"):
        assert words in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_a_page_that_cannot_be_written_is_one_line(run, tmp_path):
    result = invoke(run, "--page", tmp_path / "nowhere" / "report.html")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nowhere/report.html cannot be written" in result.stderr


def test_a_damaged_journal_is_refused_by_name(run):
    (run / "journal-1.sqlite").write_bytes(b"no database" * 100)
    result = invoke(run)
    assert result.exit_code == 2
    assert result.stderr == (
        f"freetrain report: the journal {run / 'journal-1.sqlite'} cannot be read: file is not a database\n"
    )


def test_a_missing_journal_is_named_and_the_others_are_counted(run, tmp_path):
    """As after the run directory was moved: zero would be wrong."""
    (run / "journal-1.sqlite").unlink()
    figures = json.loads(invoke(run, "--json", "--page", tmp_path / "report.html").stdout)
    assert (figures["missing_journals"], figures["held_node_seconds"]) == ([str(run / "journal-1.sqlite")], 80)
    line = f"the journal {run / 'journal-1.sqlite'} is missing: nothing of its driver is counted"
    assert line in invoke(run).stdout
    assert line in (tmp_path / "report.html").read_text()


def test_a_driver_that_was_replaced_has_ended_although_its_last_heartbeat_is_in_the_future(run):
    """By the clock of another host: its nodes were counted until now, as those of the driver that runs."""
    held = json.loads(invoke(run, "--json").stdout)["held_node_seconds"]
    with sqlite3.connect(run / DATABASE) as database:
        database.execute(
            "UPDATE driver SET host = 'elsewhere', heartbeat = 1e12, ended = NULL, how = NULL WHERE id = 1"
        )
    database.close()
    with sqlite3.connect(run / "journal-1.sqlite") as database:
        database.execute("DELETE FROM event WHERE kind = 'block_ended'")
    database.close()
    figures = json.loads(invoke(run, "--json").stdout)
    assert (figures["held_node_seconds"], figures["blocks_unfinished"]) == (held, 1)


def test_a_record_with_unexpected_content_is_refused_by_name(run):
    with sqlite3.connect(run / "journal-1.sqlite") as database:
        database.execute("""UPDATE event SET detail = '{"nodes": 3, "ends": 1}' WHERE kind = 'block_started'""")
    database.close()
    result = invoke(run)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "journal-1.sqlite cannot be read" in result.stderr


def test_without_a_run_it_is_one_line(tmp_path):
    result = invoke(tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
