"""`freetrain run`: a usage error is one line with exit code 2, and nothing is submitted or left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freetrain_parsl.cli.commands import app

APP = Path(__file__).parents[1] / "campaign" / "slow_app.py"
CAMPAIGN = f"trainings: [{{app: '{APP}:train', name: one}}]\n"


@pytest.fixture
def run(tmp_path, tmp_path_factory, monkeypatch):
    """Run the verb in a directory with a valid site and campaign, and other files from the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN)
    (tmp_path / "place.yaml").write_text("system: local\n")

    def invoke(*arguments: str, **files: str):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, ["run", *arguments])
        assert sorted(tmp_path.rglob("*")) == before, "nothing was created"
        return result

    return invoke


@pytest.mark.parametrize(
    ("arguments", "files", "message"),
    [
        (["campaign.yaml", "--detach", "--json"], {}, "--detach and --json exclude each other"),
        (["none.yaml"], {}, "none.yaml: cannot read the campaign file: No such file or directory"),
        (
            ["campaign.yaml", "--config", "none.yaml"],
            {},
            "none.yaml: cannot read the site file: No such file or directory",
        ),
        (["campaign.yaml", "--config", "locale"], {}, "no shipped site of that name (did you mean 'local'?)"),
        (
            ["campaign.yaml", "--config", "polaris", "--set", "venv=/v"],
            {},
            "block.account needs a value for ${ACCOUNT}",
        ),
        (["campaign.yaml", "--set", "account"], {}, "--set account: write --set name=value"),
        (["campaign.yaml", "--set", "x=1", "--config", "place.yaml"], {}, "--set x=…: the files have no ${X}"),
        (["campaign.yaml"], {"campaign": "trainings: []"}, "campaign.yaml:1: there are no 'trainings'"),
        (
            ["campaign.yaml", "--config", "place.yaml"],
            {"place": "system: lsf"},
            "place.yaml:1: system: must be",
        ),
        (
            ["campaign.yaml", "--config", "place.yaml"],
            {"place": "system: local\nblock: {cluster: gone}"},
            "no embedded cluster 'gone' is running",
        ),
        (
            ["campaign.yaml", "--config", "place.yaml"],
            {"place": "system: local\ncheckpoints: {least_free: 1000000 TB}"},
            "MB are free, fewer than the",
        ),
        (["campaign.yaml", "--run-dir", "."], {}, "is not empty; give a new one, or continue that one with"),
        (["campaign.yaml", "--run-dir", "my run"], {}, "/my run' may hold letters, digits and"),
        (["campaign.yaml", "--run-dir", "place.yaml/run"], {}, "Not a directory; choose another directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, files, message) -> None:
    result = run(*arguments, **files)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("freetrain run: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("site", "command"),
    [
        ("system: slurm\nblock: {partition: p}", "sinfo|scontrol|squeue"),
        ("system: pbs\nblock: {queue: q}", "qstat|pbsnodes"),
    ],
)
def test_a_batch_system_whose_commands_are_not_here_is_told(run, monkeypatch, tmp_path, site, command) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    result = run("campaign.yaml", "--config", "place.yaml", place=site)
    assert result.exit_code == 2, result.output
    assert "is not on PATH" in result.stderr
    assert any(word in result.stderr for word in command.split("|"))
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo nonsense", ""), ("echo 'slurm_load: Unable to contact slurm controller' >&2; exit 1", "Unable to contact")],
    ids=["garbage", "down"],
)
def test_a_slurm_that_answers_garbage_or_not_at_all_is_one_line(run, monkeypatch, tmp_path, script, message) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sinfo", "squeue", "scontrol", "sacct", "sacctmgr", "sbatch", "scancel"):
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    result = run("campaign.yaml", "--config", "place.yaml", place="system: slurm\nblock: {partition: p}")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.cluster
def test_without_a_terminal_progress_is_lines_and_json_has_the_results_alone(tmp_path) -> None:
    """The shipped site for this machine starts its own cluster, and stops it at the end."""
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN)
    command = [str(Path(sys.executable).with_name("freetrain")), "run", "campaign.yaml", "--run-dir", "run", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["finished"], told["failed"], told["driver"]["how"]) == (1, 0, "finished")
    assert told["trainings"][0]["result"]["samples"] == 6 * 200
    assert "one            running on n0" in done.stderr
    assert "one            finished, 100% done" in done.stderr
    shown = CliRunner().invoke(app, ["status", str(tmp_path / "run")]).stdout
    assert "1 of 1 training jobs finished" in shown
    assert "has ended cleanly (finished)" in shown


def test_the_site_file_of_this_directory_is_the_default(run, tmp_path) -> None:
    (tmp_path / "site.yaml").write_text("system: local\nblock: {cluster: gone}")
    result = run("campaign.yaml")
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first == "using site.yaml; --config chooses another site"
    assert "no embedded cluster 'gone' is running" in second
    assert len(run("campaign.yaml", "--config", "none.yaml").stderr.splitlines()) == 1
