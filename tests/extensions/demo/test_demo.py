"""``freetrain demo``: the whole package in one command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from freetrain_parsl import __version__
from freetrain_parsl.cli.commands import app
from freetrain_parsl.extensions.demo.command import _CAMPAIGN
from tests.foreign_runs import as_two_users, give

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "trainings_completed",
    "fragments",
    "rescales",
    "resumes_from_checkpoint",
    "idle_node_seconds_offered",
    "idle_node_seconds_used",
    "useful_node_seconds",
    "samples_lost",
    "duplicate_samples",
    "main_jobs",
    "main_jobs_delayed",
    "main_job_delay_seconds_max",
    "final_metrics",
    "solver",
}


# The command with a fifth of the epochs; the command itself trains for two or three minutes on two cores.
_SHORT = """
from dataclasses import replace
from freetrain_parsl.cli import main
from freetrain_parsl.extensions.demo import command as demo
demo._CAMPAIGN = tuple(
    replace(entry, arguments={**entry.arguments, "epochs": entry.arguments["epochs"] // 5}) for entry in demo._CAMPAIGN
)
main()
"""


@pytest.mark.smoke
@pytest.mark.cluster
def test_the_demo_completes_every_training_and_tells_the_truth_in_json(tmp_path: Path) -> None:
    limit = 1200  # eight nodes start slowly on two cores shared with other tests
    options = ["--run-dir", "run", "--json", "figures.json", "--time-limit", str(limit), "--page"]
    command = [sys.executable, "-c", _SHORT, "demo", *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        address = next((line.split()[-1] for line in running.stdout if line.startswith("live page: ")), "")
        if address:
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert answer.status == 200
        stdout, stderr = running.communicate(timeout=limit + 60)
    assert (address[:7], running.returncode) == ("http://", 0), stdout[-3000:] + stderr[-3000:]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=60)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures.keys() >= KEYS
    assert figures["trainings_completed"] == len(_CAMPAIGN) >= 6
    assert (figures["samples_lost"], figures["duplicate_samples"]) == (0, 0)
    assert figures["final_metrics"].keys() == {entry.name for entry in _CAMPAIGN}
    for entry in _CAMPAIGN:
        metrics = figures["final_metrics"][entry.name]
        assert metrics["epochs"] == entry.arguments["epochs"] // 5
        assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]
    assert figures["fragments"] >= len(_CAMPAIGN)
    assert 0 < figures["useful_node_seconds"] <= figures["idle_node_seconds_used"]
    assert figures["idle_node_seconds_used"] <= figures["idle_node_seconds_offered"]
    assert figures["main_jobs"] >= 5
    assert figures["main_job_delay_seconds_max"] <= 10.0, "the grace periods of a preemption and of one before it"
    assert figures["solver"]["proven"] >= 0.9 * figures["solver"]["solves"] > 0
    assert (tmp_path / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert stderr == ""
    _try_the_commands(stdout, tmp_path)


def _try_the_commands(printed: str, directory: Path) -> None:
    """Run each command that the demo ends with, in the directory in which it was started."""
    after = printed.partition("timeline: ")[2].splitlines()[1:]
    commands = [shlex.split(line, comments=True) for line in after if line]
    assert [command[1] for command in commands] == ["dashboard", "status", "explain", "logs", "report"]
    # The installed command may be of another checkout.
    dashboard, *others = (
        [sys.executable, "-c", "from freetrain_parsl.cli import main; main()", *c[1:]] for c in commands
    )
    for command in others:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), command
        shown = {"logs": "trains on", "explain": "digits-wide: finished"}.get(
            command[3], "7 of 7 training jobs finished"
        )
        assert shown in done.stdout, command
    with subprocess.Popen(dashboard, cwd=directory, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        try:
            address = next(line.strip() for line in page.stdout if "http://" in line)
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert answer.status == 200
        finally:
            page.terminate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--json nowhere/figures.json", "there is no directory"),
        ("--run-dir full", "is not empty"),
        ("--policy best", "unknown policy 'best'"),
        ("--time-limit 0", "--time-limit must be positive"),
        ("--nodes 0", "a workload needs nodes"),
        ("--job-log missing.swf", "missing.swf"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any, arguments: str, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    monkeypatch.chdir(tmp_path)
    done = command(f"demo {arguments}")
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@as_two_users
def test_an_empty_directory_of_another_user_is_refused(tmp_path: Path, command: Any) -> None:
    """Its owner can exchange the jobs' scripts."""
    (tmp_path / "run").mkdir()
    give(tmp_path / "run")
    done = command(f"demo --run-dir {tmp_path / 'run'}")
    assert done.code == 2
    assert "who could have put anything there; choose another directory" in done.err
    assert list((tmp_path / "run").iterdir()) == []


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"freetrain {__version__}"
