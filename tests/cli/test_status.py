"""`freetrain status`, `stop`, `resume` and `clean` on run directories without a driver, or driven by this process."""

from __future__ import annotations

import json
import re
import time

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.summary import ago
from freetrain_parsl.cli.commands import app
from freetrain_parsl.cli.runs.explain import runs_here
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.protocol.journal import (
    BlockRequested,
    BlockSubmitted,
    StartsFailed,
    TrainingFailed,
    TrainingStalled,
    TrainingSubmitted,
    TrainingTriesAgain,
    TrainingWaits,
    TrainsAlone,
)

FACTS = {
    "name": "sweep",
    "run_id": "r",
    "created": 1.0,
    "campaign_file": "/c.yaml",
    "campaign_text": "trainings: [{app: 'gone.py:train'}]",
    "site_file": "/s.yaml",
    "site_text": "system: local",
    "variables": {},
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "freetrain-run-1"
    directory.mkdir()
    return RunStore.create(directory, FACTS, ["a", "b"])


def freetrain(*arguments: str):
    return CliRunner().invoke(app, arguments)


def killed(store: RunStore) -> int:
    """Register a driver whose process is gone; return its number."""
    host, pid, started = own_identity()
    return store.begin_driver(host, pid, started - 1)


@pytest.mark.parametrize("verb", ["status", "stop", "resume", "clean"])
def test_without_a_run_it_is_one_line_and_exit_code_2(verb, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (([], "there is no freetrain-run-… in"), (["x"], "x is not a run directory")):
        result = freetrain(verb, *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"freetrain {verb}: ")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_status_shows_results_errors_and_that_the_driver_has_died(store) -> None:
    killed(store)
    store.finish("a", {"loss": 0.123456, "history": [1, 2]})
    store.fail("b", "ValueError: no data\nTraceback …", final=True)
    shown = freetrain("status").stdout
    assert "sweep: 1 of 2 training jobs finished" in shown
    assert re.search(r"has died; last heartbeat \d+ s ago; to continue: freetrain resume", shown)
    assert "loss 0.12346" in shown
    assert "ValueError: no data" in shown
    assert "Traceback" not in shown


def test_what_a_dead_driver_ran_does_not_run_any_more(store) -> None:
    host, pid, started = own_identity()
    store.beat(store.begin_driver(host, pid, started - 1), {"a": ("running", 0.5, ["n1"])})
    (first, _) = json.loads(freetrain("status", "--json").stdout)["trainings"]
    assert (first["state"], first["share"], first["nodes"]) == ("waiting", 0.5, [])


def test_status_as_json_tells_everything(store) -> None:
    store.begin_driver(*own_identity())
    told = json.loads(freetrain("status", str(store.directory), "--json").stdout)
    assert told["driver"]["state"] == "alive"
    assert [item["name"] for item in told["trainings"]] == ["a", "b"]
    assert (told["finished"], told["failed"], told["run_dir"]) == (0, 0, str(store.directory))


def test_stop_gives_up_waiting_and_says_so(store) -> None:
    store.begin_driver(*own_identity())
    result = freetrain("stop", "--timeout", "0")
    assert result.exit_code == 1
    assert "the driver did not stop within 0 s" in result.stdout
    assert store.stop_requested()


def test_stop_of_a_dead_driver_tells_how_to_clean_up(store) -> None:
    killed(store)
    result = freetrain("stop")
    assert result.exit_code == 1
    assert "freetrain clean" in result.stdout


def test_stop_of_a_run_that_has_ended_is_done(store) -> None:
    store.end_driver(store.begin_driver(*own_identity()), "finished")
    result = freetrain("stop")
    assert result.exit_code == 0
    assert "has ended cleanly (finished)" in result.stdout


def test_a_run_that_somebody_drives_is_left_alone(store) -> None:
    store.begin_driver(*own_identity())
    result = freetrain("clean")
    assert result.exit_code == 2
    assert "its driver runs on" in result.stderr


def test_resume_tells_that_an_app_is_gone(store) -> None:
    result = freetrain("resume")
    assert result.exit_code == 2
    assert result.stderr == "freetrain resume: /c.yaml:1: trainings[1].app: no such file: /gone.py\n"


def test_clean_of_a_run_on_a_cluster_that_died_with_its_driver_finds_nothing(store) -> None:
    killed(store)
    assert freetrain("clean").stdout == "no remaining jobs\n"


def test_clean_removes_what_nodes_read_when_they_started(store, tmp_path) -> None:
    """An image of the Python environment is large, and the driver that would have removed it was killed."""
    driver = killed(store)
    (tmp_path / "logs" / "start").mkdir(parents=True)
    (tmp_path / "logs" / "start" / "image-0.tar.gz").touch()
    store.describe_driver(driver, "freetrain.x.r.", tmp_path / "logs" / "journal.sqlite")
    assert freetrain("clean").exit_code == 0
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s ago"), (90, "90 s ago"), (600, "10 min ago"), (7200, "2 h ago"), (1e6, "12 d ago")]
)
def test_times_are_told_in_peoples_units(seconds, text) -> None:
    assert ago(seconds) == text


def test_status_does_not_read_the_whole_journal(store, tmp_path, monkeypatch) -> None:
    """Of a run of a day this took half a second of a processor; its last failed start is all that it needs."""
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write(1.0, StartsFailed("", 3, 5, time.time() + 3600, "exit code 1"))
    journal.close()
    store.describe_driver(store.begin_driver(*own_identity()), "freetrain.x.", journal.path)
    monkeypatch.setattr("freetrain_parsl.report.projection.run.RunState.refresh", lambda _: pytest.fail("read"))
    assert json.loads(freetrain("status", "--json").stdout)["failed_starts"]["count"] == 3


def test_status_and_explain_say_that_blocks_cannot_start(store, tmp_path) -> None:
    """The warning ends once a block has started, or the driver is gone."""
    journal = Journal(tmp_path / "journal.sqlite")
    detail = {
        "count": 3,
        "most": 5,
        "next_attempt": time.time() + 3600,
        "reason": "block 7 (job 9) failed; exit code 1",
    }
    journal.write(1.0, StartsFailed("", **detail))
    journal.commit()
    driver = store.begin_driver(*own_identity())
    store.describe_driver(driver, "freetrain.x.", journal.path)
    sentence = "the last 3 of at most 5 attempts to start a block failed, next attempt in 3"
    assert sentence in freetrain("status").stdout
    assert json.loads(freetrain("status", "--json").stdout)["failed_starts"] == detail
    (note,) = runs_here()
    assert note.startswith(f"freetrain-run-1: {sentence}")
    assert note.endswith("exit code 1")
    journal.write(2.0, StartsFailed("", 0, 5, None, ""))
    journal.commit()
    assert "attempts" not in freetrain("status").stdout
    assert list(runs_here()) == []
    journal.close()


def test_explain_names_the_trainings_that_wait_for_their_checkpoint_directory(store, tmp_path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for name in "abcd":
        journal.write(1.0, TrainingSubmitted(name, 1, 2, None))
        journal.write(1.0, TrainingWaits(name, "the checkpoint directory /ck is full (ENOSPC)", time.time() + 60))
    journal.commit()
    store.describe_driver(store.begin_driver(*own_identity()), "freetrain.x.", journal.path)
    assert list(runs_here()) == [
        "freetrain-run-1: a, b, c, …: cannot start: the checkpoint directory /ck is full (ENOSPC)"
    ]
    for name in "abcd":
        journal.write(2.0, TrainingTriesAgain(name))
    journal.commit()
    assert list(runs_here()) == []
    journal.write(3.0, TrainsAlone("a", "the models are of different classes"))
    journal.commit()
    assert list(runs_here()) == ["freetrain-run-1: a: not fused: the models are of different classes"]
    journal.close()


def test_explain_says_why_one_training_waits(store, tmp_path) -> None:
    """Named as for the other verbs; of a campaign file, none can be named."""
    journal = Journal(tmp_path / "journal.sqlite")
    for name in "ab":
        journal.write(1.0, TrainingSubmitted(name, 1, 2, None))
    journal.write(2.0, BlockRequested("0", ["n1", "n2"], 600.0, None))
    journal.write(2.0, BlockSubmitted("0", "17"))
    journal.commit()
    store.describe_driver(store.begin_driver(*own_identity()), "freetrain.x.", journal.path)
    told = freetrain("explain", str(store.directory), "b").stdout.splitlines()
    assert told == ["the driver runs", "b: waiting: waits for its 2 nodes: job 17 is in the queue, or starting"]
    result = freetrain("explain", str(store.directory), "c")
    assert (result.exit_code, result.stderr) == (
        2,
        f"freetrain explain: {store.directory} has no training job 'c'\n",
    )
    result = freetrain("explain", "sweep.yaml", "a")
    assert (result.exit_code, "sweep.yaml is not a run directory" in result.stderr) == (2, True)
    journal.close()


def test_explain_names_the_trainings_that_make_no_progress(store, tmp_path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for name in "ab":
        journal.write(1.0, TrainingSubmitted(name, 1, 2, None))
        journal.write(2.0, TrainingStalled(name, "has made no step for more than 10 min on n0"))
    journal.write(3.0, TrainingFailed("b", "ValueError: bad"))
    journal.commit()
    store.describe_driver(store.begin_driver(*own_identity()), "freetrain.x.", journal.path)
    assert list(runs_here()) == ["freetrain-run-1: a: has made no step for more than 10 min on n0"]
    journal.close()


def test_cancel_without_a_driver_marks_the_training_and_resume_needs_its_name(store) -> None:
    killed(store)
    result = freetrain("cancel", str(store.directory), "a")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a is cancelled; its checkpoints are kept. To continue it: freetrain resume")
    assert [item.state for item in store.trainings()] == ["cancelled", "waiting"]
    assert json.loads(freetrain("status", "--json").stdout)["cancelled"] == 1
    store.retry_failed()
    assert store.training("a").state == "cancelled"
    store.retry("a")
    assert store.training("a").state == "waiting"


def test_cancel_asks_a_living_driver_and_says_when_it_does_not_answer(store) -> None:
    store.begin_driver(*own_identity())
    result = freetrain("cancel", str(store.directory), "a", "--timeout", "0")
    assert result.exit_code == 1
    assert "a did not stop within 0 s" in result.stdout
    assert store.cancellations() == ["a"]
    assert not store.stop_requested()


@pytest.mark.parametrize(
    ("run", "name", "message"),
    [
        ("x", "a", "x is not a run directory of 'freetrain run'"),
        ("freetrain-run-1", "aa", "has no training job 'aa' (did you mean 'a'?)"),
        ("freetrain-run-1", "b", "b has ended already: finished"),
        ("y" * 5000, "a", "File name too long"),
    ],
)
def test_cancel_refuses_in_one_line(store, run, name, message) -> None:
    store.finish("b", 1)
    result = freetrain("cancel", run, name)
    assert result.exit_code == 2
    assert result.stderr.startswith("freetrain cancel: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_training_that_has_finished_is_not_tried_again(store) -> None:
    store.finish("b", 1)
    with pytest.raises(InvalidInput, match="b has finished; there is nothing to retry"):
        store.retry("b")
    with pytest.raises(InvalidInput, match="has no training job 'c'"):
        store.retry("c")


def test_an_error_is_a_line_of_its_own_however_narrow_the_terminal_is(store, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    error = f"CodeChanged: training job 'b': checkpoint {'/long' * 30} was written by other code"
    store.fail("b", error, final=True)
    lines = freetrain("status", str(store.directory)).stdout.splitlines()
    assert f"b: {error}" in lines
    assert any(line.split()[:2] == ["b", "failed"] and line.rstrip().endswith("CodeChanged") for line in lines)
