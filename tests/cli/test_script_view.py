"""The verbs on the run directory of a Parsl script, which has a journal and no database of a campaign."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.commands import app
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.demo import command as demo
from freetrain_parsl.protocol.journal import (
    FragmentStarted,
    StartsFailed,
    TrainingFailed,
    TrainingSubmitted,
    TrainsAlone,
)
from freetrain_parsl.protocol.reports import Progress
from tests.cli.test_status import FACTS

WHY = "its code differs from that of the others"


def write_journal(path):
    path.parent.mkdir(parents=True)
    journal = Journal(path)
    for name in ("a", "b"):
        journal.write(1.0, TrainingSubmitted(name, 1, 2, 600))
    journal.write(2.0, TrainsAlone("a", WHY))
    journal.write(3.0, TrainingFailed("b", "ValueError: no \x1b[2J data\nmore"))
    journal.keep_progress(4.0, "a", Progress(3, 30, 300, 600, loss=0.25, slot_seconds=10.0))
    journal.close()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make the directories of a demo's run, with those of a Parsl script in it, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write_journal(tmp_path / "demo" / "parsl" / "000" / "freetrain" / "journal.sqlite")
    logs = tmp_path / "demo" / "parsl" / "000" / "logs"
    logs.mkdir()
    (logs / "a.log").write_bytes(b"")
    return tmp_path


def freetrain(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("directory", ["demo", "demo/parsl", "demo/parsl/000", "demo/parsl/000/freetrain"])
def test_each_directory_above_the_journal_opens_it(here, directory):
    status = freetrain("status", directory)
    assert status.exit_code == 0, status.stderr
    head, line, *table = status.stdout.splitlines()
    assert "0 of 2 training jobs finished, in" in head
    assert line == "a Parsl script, which has ended"
    assert any(row.startswith("a ") and "epoch 3" in row and "50%" in row for row in table)
    assert "\x1b" not in status.stdout
    report = json.loads(freetrain("report", directory, "--json").stdout)
    assert (report["samples"], report["trainings"]["failed"], report["drivers"]) == (300, 1, 1)
    assert freetrain("report", directory).stdout.startswith(report["name"])


def test_it_says_why_each_is_where_it_is(here):
    explained = freetrain("explain", "demo")
    assert explained.stdout.splitlines() == [
        "no driver runs; this is what the last one has recorded",
        f"a: waiting: not fused: {WHY}",
        "b: failed: ValueError: no  data",
    ]
    figures = json.loads(freetrain("explain", "demo", "--json").stdout)
    assert [item["state"] for item in figures["trainings"]] == ["waiting", "failed"]


def test_nothing_runs_after_the_script_has_ended(here):
    """As after Ctrl-C, which leaves no record; `status` said "running on n1" below "which has ended"."""
    journal = Journal(here / "demo/parsl/000/freetrain/journal.sqlite")
    journal.write(5.0, FragmentStarted("a", 1, ["n1"], in_place=False, paused=0.0))
    journal.close()
    shown = json.loads(freetrain("status", "demo", "--json").stdout)["trainings"][0]
    assert (shown["state"], shown["nodes"], shown["share"]) == ("waiting", [], 0.5)
    assert freetrain("explain", "demo", "a").stdout.splitlines()[1] == "a: waiting: was running when its driver ended"


def test_status_is_a_document_too(here):
    figures = json.loads(freetrain("status", "demo", "--json").stdout)
    assert (figures["running"], figures["failed"]) == (False, 1)
    assert figures["trainings"][0]["share"] == 0.5
    assert figures["run_dir"] == str(here / "demo" / "parsl" / "000")


def test_logs_are_found_from_above(here):
    assert freetrain("logs", "demo").exit_code == 0
    refused = freetrain("logs", "demo", "b")
    assert (refused.exit_code, "has no training job 'b'" in refused.stderr) == (2, True)


def test_several_runs_are_named_instead_of_one_guessed(here):
    shutil.copytree("demo/parsl/000", "demo/parsl/001")
    for verb in ("status", "report", "explain", "logs", "dashboard"):
        refused = freetrain(verb, "demo")
        assert refused.exit_code == 2
        assert "has 2 journals; give the directory of one of them, such as " in refused.stderr
        assert refused.stderr.endswith("/demo/parsl/001/freetrain\n")


def test_a_damaged_journal_is_one_line(here):
    (here / "demo/parsl/000/freetrain/journal.sqlite").write_bytes(b"no database" * 200)
    for verb in ("status", "report", "explain"):
        refused = freetrain(verb, "demo")
        assert refused.exit_code == 2
        assert "cannot be read" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_explain_opens_a_campaign_as_well(tmp_path):
    store = RunStore.create(tmp_path, FACTS, ["a", "b"])
    assert "has no journal yet" in freetrain("explain", str(tmp_path)).stderr
    path = tmp_path / "driver" / "journal.sqlite"
    write_journal(path)
    journal = Journal(path)
    journal.write(5.0, StartsFailed("", count=2, most=5, reason="exit 1", next_attempt=9.0))
    journal.close()
    driver = store.begin_driver(*own_identity())
    store.describe_driver(driver, "ft-", path)
    lines = freetrain("explain", str(tmp_path)).stdout.splitlines()
    assert lines[0] == "the driver runs"
    assert "exit 1" in lines[1]
    assert lines[2].startswith("a: waiting: not fused")


def test_the_commands_of_the_demo_are_those_of_this_shell(here, monkeypatch, tmp_path_factory):
    environment = tmp_path_factory.mktemp("environment")
    script = environment / "freetrain"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    plain = [line for line in demo._next_commands(here / "my run") if line]
    assert plain[0].startswith(f"{script} dashboard 'my run' ")
    monkeypatch.setenv("PATH", str(environment))
    assert demo._next_commands(here / "my run")[1].startswith("freetrain dashboard 'my run' ")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(environment)
    assert demo._next_commands(here / "run")[1].startswith(f"freetrain dashboard {here / 'run'} ")
