"""`freetrain logs`, and its function in Python, on run directories of this test."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.logs import log_lines, trainings_of
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.commands import app
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.training_logs import as_text

FACTS = {"name": "sweep", "run_id": "r", "created": 1.0}


@pytest.fixture
def run_dir(tmp_path):
    """Make a run of two training jobs whose driver has ended; the third has no log yet."""
    store = RunStore.create(tmp_path, FACTS, ["lr-0.1", "lr-0.05", "idle"])
    driver = store.begin_driver(*own_identity())
    store.end_driver(driver, "finished")
    (tmp_path / "logs").mkdir()
    lines = [
        ("=", "trains on n01"),
        ("0", "epoch 0"),
        ("1", "other"),
        ("!1", "ValueError: x"),
        ("?", "new"),
    ]
    for shift, name in enumerate(["lr-0.1", "lr-0.05"]):
        text = "".join(as_text(10.0 * at + shift, source, text) for at, (source, text) in enumerate(lines))
        (tmp_path / "logs" / f"{name}.log").write_text(text)
    return tmp_path


def freetrain(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_one_training_is_shown_as_it_was_printed(run_dir) -> None:
    shown = freetrain("logs", run_dir, "lr-0.1")
    assert shown.exit_code == 0
    first, *others = shown.stdout.splitlines()
    assert first.startswith("── 1970-01-0")
    assert first.endswith(" trains on n01 ──")
    assert others == ["epoch 0", "ValueError: x"]
    everything = freetrain("logs", run_dir, "lr-0.1", "--all").stdout.splitlines()
    assert everything[1:] == ["epoch 0", "[1] other", "[1] ValueError: x", "[joining] new"]


def test_all_trainings_are_merged_by_time_with_their_names(run_dir) -> None:
    shown = freetrain("logs", run_dir, "--tail", 2).stdout
    assert shown.splitlines() == ["lr-0.1  | ValueError: x", "lr-0.05 | ValueError: x"]


def test_without_a_directory_the_newest_run_here_is_shown(run_dir, monkeypatch) -> None:
    monkeypatch.chdir(run_dir)
    newest = run_dir / "freetrain-run-1"
    newest.mkdir()
    RunStore.create(newest, FACTS, ["here"])
    (newest / "logs").mkdir()
    (newest / "logs" / "here.log").write_text(as_text(1.0, "0", "epoch 7"))
    assert freetrain("logs").stdout == "epoch 7\n"


def test_following_an_ended_run_ends(run_dir) -> None:
    assert freetrain("logs", run_dir, "lr-0.05", "--follow").stdout.splitlines()[1:] == ["epoch 0", "ValueError: x"]


def test_following_ends_with_the_driver(run_dir) -> None:
    store = RunStore(run_dir)
    driver = store.begin_driver(*own_identity())
    waits = 0

    def sleep(_seconds: float) -> None:
        nonlocal waits
        waits += 1
        with (run_dir / "logs" / "idle.log").open("a") as file:
            file.write(as_text(100.0 + waits, "0", f"line {waits}"))
        if waits == 3:
            store.end_driver(driver, "finished")

    lines = log_lines(run_dir, "idle", follow=True, sleep=sleep)
    assert [line.text for line in lines] == ["line 1", "line 2", "line 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lr-0.2"], "has no training job 'lr-0.2' (did you mean 'lr-0."),
        (["../../etc/passwd"], "has no training job '../../etc/passwd'"),
        (["\x1b[31m"], "has no training job '\\x1b[31m'"),
    ],
)
def test_an_unknown_training_is_refused_in_one_line(run_dir, arguments, message) -> None:
    refused = freetrain("logs", run_dir, *arguments)
    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1
    assert message in refused.stderr


def test_a_directory_without_a_run_is_refused(tmp_path) -> None:
    refused = freetrain("logs", tmp_path / "x")
    assert refused.exit_code == 2
    assert "is not a run directory" in refused.stderr
    with pytest.raises(InvalidInput, match="must not be negative"):
        log_lines(tmp_path, tail=-1)


def test_the_run_directory_of_a_parsl_script_will_do(run_dir, tmp_path) -> None:
    (run_dir / "campaign.sqlite").unlink()
    assert trainings_of(run_dir) == ["lr-0.05", "lr-0.1"]
    assert [line.text for line in log_lines(run_dir, "lr-0.1", tail=1)] == ["ValueError: x"]
    assert freetrain("logs", run_dir, "lr-0.05", "--follow").exit_code == 0
