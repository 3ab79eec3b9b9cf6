"""A run that another user has left is shown when it is asked for, and nothing else happens because of it."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.directories import find_run, make_run_directory, run_directories
from freetrain_parsl.campaign.lock import driver_lock, own_identity
from freetrain_parsl.campaign.logs import log_lines
from freetrain_parsl.campaign.orphans import remove_orphans
from freetrain_parsl.campaign.owned_trainings import Assignment
from freetrain_parsl.campaign.run_source import open_source
from freetrain_parsl.campaign.store import DATABASE, RunStore, StateUnreadable
from freetrain_parsl.campaign.stored_run import StoredRun
from freetrain_parsl.cli.commands import app as command_line
from freetrain_parsl.errors import FreeTrainError, InvalidInput
from freetrain_parsl.executor.run_directory import check_new_run_directory
from freetrain_parsl.extensions.globus.storage.mover_directory import STATE_FILE, MoverState
from freetrain_parsl.extensions.notebook import Campaign
from freetrain_parsl.extensions.notebook.control import take_control
from tests.foreign_runs import BOB, add_driver, add_hot_journal, as_two_users, change, give, plant

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory like ``/scratch``, and work there."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.chdir(place)
    return place


def freetrain(*arguments: str) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(command_line, arguments)


@as_two_users
@pytest.mark.parametrize("verb", ["status", "report", "resume", "clean", "stop", "dashboard"])
def test_without_an_argument_only_runs_of_this_user_are_taken(shared: Path, verb: str) -> None:
    give(plant(shared / "freetrain-run-29991231-235959"))
    done = freetrain(verb)
    assert done.exit_code == 2
    assert "there is no freetrain-run-… of yours here (freetrain-run-29991231-235959 belongs to" in done.output


@as_two_users
def test_runs_of_others_and_damaged_ones_do_not_stand_in_the_way(shared: Path) -> None:
    mine = plant(shared / "freetrain-run-1", created=1.0)
    give(plant(shared / "freetrain-run-2"))
    plant(shared / "freetrain-run-3").joinpath(DATABASE).write_bytes(b"\0" * 4096)
    odd = plant(shared / "freetrain-run-4")
    change(odd / DATABASE, "UPDATE fact SET value = ? WHERE key = 'created'", "[" * 100_000)
    pipe = shared / "freetrain-run-5"
    pipe.mkdir()
    os.mkfifo(pipe / DATABASE)
    (shared / "freetrain-run-6").symlink_to(shared / "freetrain-run-2")
    give(plant(shared / "elsewhere"))
    (shared / "freetrain-run-7").symlink_to(mine)
    os.chown(shared / "freetrain-run-7", BOB, BOB, follow_symlinks=False)
    assert [run.name for run in run_directories()] == ["freetrain-run-1"]
    assert find_run(None).name == "freetrain-run-1"


@as_two_users
@pytest.mark.parametrize("verb", ["resume", "clean", "stop", "cancel", "checkpoints prune --keep 1"])
def test_what_changes_a_run_is_for_its_owner(shared: Path, tmp_path: Path, verb: str) -> None:
    victim = tmp_path / "results.txt"
    victim.write_text("five years of work")
    run = plant(shared / "run")
    add_hot_journal(run / DATABASE, victim)
    give(run)
    before = {path: path.stat() for path in run.rglob("*")}
    name, *options = verb.split()
    arguments = [name, *options[:1], str(run), *options[1:]] if options else [name, str(run)]
    done = freetrain(*arguments, *(["t"] if verb == "cancel" else []))
    assert done.exit_code == 2
    assert "run belongs to" in done.output
    assert "only its owner can resume, stop, cancel, prune or clean it" in done.output
    assert victim.exists()
    assert {path: path.stat() for path in run.rglob("*")} == before


@as_two_users
def test_a_run_of_another_user_is_shown_by_path(shared: Path) -> None:
    run = give(plant(shared / "run"))
    done = freetrain("status", str(run))
    assert done.exit_code == 0
    assert f"{run} belongs to" in done.output
    assert "it is shown from a copy" in done.output
    assert "camp: 0 of 1 training jobs finished" in done.output
    with pytest.raises(InvalidInput, match="only its owner can stop it"):
        open_source(run).stop()


@pytest.mark.parametrize("verb", ["status", "report", "logs", "stop", "clean", "resume"])
def test_no_verb_removes_what_a_journal_names(shared: Path, tmp_path: Path, verb: str) -> None:
    """As in an archive of another user, whose files belong to whoever has unpacked it."""
    victim = tmp_path / "results.txt"
    victim.write_text("five years of work")
    run = plant(shared / "run")
    add_hot_journal(run / DATABASE, victim)
    done = freetrain(verb, str(run))
    assert victim.exists()
    assert done.exit_code == 2
    assert "names another file, which SQLite would remove" in done.output


def test_a_run_that_others_may_write_is_not_resumed(shared: Path) -> None:
    run = plant(shared / "run")
    (run / DATABASE).chmod(0o666)
    assert "can be changed by other users" in StoredRun(run).distrust
    with pytest.raises(InvalidInput, match=f"chmod -R go-w {run}"):
        RunStore(run)
    (run / DATABASE).chmod(0o600)
    run.chmod(0o775)
    with pytest.raises(InvalidInput, match="can be changed by other users"):
        RunStore(run)


@as_two_users
@pytest.mark.parametrize("journal", ["/etc/passwd", "../../../etc/passwd", "a/b/c/link.sqlite", "a/../../etc/passwd"])
def test_the_journal_of_a_run_of_others_is_in_its_directory(shared: Path, journal: str) -> None:
    run = plant(shared / "run")
    (run / "a" / "b" / "c").mkdir(parents=True)
    (run / "a" / "b" / "c" / "link.sqlite").symlink_to("/etc/passwd")
    (run / "a" / "b" / "c" / "journal.sqlite").touch()
    add_driver(run, journal=journal)
    add_driver(run, journal="/somewhere/else/a/b/c/journal.sqlite")
    give(run)
    assert [driver.journal for driver in StoredRun(run).drivers()] == [None, str(run / "a/b/c/journal.sqlite")]


@pytest.mark.parametrize("prefix", ["", "freetrain.", "freetrain.x.other.", "x.00c0ffee.", "freetrain.*.00c0ffee."])
def test_jobs_are_cancelled_by_prefixes_of_this_run_only(shared: Path, prefix: str) -> None:
    run = plant(shared / "run")
    add_driver(run, job_prefix="freetrain.freetrain.00c0ffee.")
    add_driver(run, job_prefix=prefix)

    class Site:
        outlives_driver = True

    def make_source(_site: object) -> Any:
        raise AssertionError("the batch system was asked")

    with pytest.raises(InvalidInput, match=r"as the prefix of its jobs.*no job is cancelled"):
        remove_orphans(Site(), RunStore(run), print, make_source=make_source)  # type: ignore[arg-type]


def test_jobs_that_the_batch_system_finds_by_another_rule_are_not_cancelled(shared: Path) -> None:
    run = plant(shared / "run")
    add_driver(run, job_prefix="freetrain.freetrain.00c0ffee.")

    class Source:
        def find_jobs(self, _prefix: str) -> dict[str, str]:
            return {"1": "somebody", "2": "freetrain_freetrain_00c0ffee_block"}

    class Site:
        outlives_driver = True

    assert remove_orphans(Site(), RunStore(run), print, make_source=lambda _: Source()) == {}  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "[" * 100_000), ("name", "["), ("name", "9" * 100_000), ("created", '{"a":' * 500 + "1" + "}" * 500)],
)
def test_deep_and_damaged_values_are_told_in_one_line(shared: Path, key: str, value: str) -> None:
    run = plant(shared / "run")
    change(run / DATABASE, "UPDATE fact SET value = ? WHERE key = ?", value, key)
    with pytest.raises(StateUnreadable) as error:
        StoredRun(run).fact(key)
    assert "\n" not in str(error.value)
    assert "damaged" in str(error.value)


@pytest.mark.parametrize(
    "script",
    [
        "UPDATE training SET nodes = '{}'",
        "UPDATE training SET nodes = x'00'",
        "UPDATE training SET name = x'00'",
        "UPDATE training SET result = '" + "[" * 5000 + "', result_is_json = 1",
        "DELETE FROM fact",
        "INSERT INTO driver VALUES (1, 'h', 'pid', 1, 1, 1, NULL, NULL, NULL, NULL)",
        "INSERT INTO driver VALUES (1, 'h', 1, 1, 'since', 1, NULL, NULL, NULL, NULL)",
        "DROP TABLE fact",
    ],
)
def test_values_of_other_types_are_told_in_one_line(shared: Path, script: str) -> None:
    run = plant(shared / "run")
    change(run / DATABASE, script)
    done = freetrain("status", str(run))
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert "Traceback" not in done.output


@as_two_users
def test_a_squatted_directory_is_refused_before_it_is_opened(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "results.txt"
    victim.write_text("five years of work")
    squatted = shared / "freetrain-run-sweep"
    squatted.mkdir()
    squatted.chmod(0o777)
    (squatted / "notebook.lock").symlink_to(victim)
    (squatted / "driver.lock").symlink_to(victim)
    os.mkfifo(squatted / "driver")
    give(squatted)
    with pytest.raises(InvalidInput, match=r"belongs to .*choose another directory"):
        make_run_directory(squatted, datetime.now(timezone.utc))
    (shared / "job.py").write_text("from freetrain_parsl import training_app\n")
    campaign = Campaign([{"app": "job.py:train"}], name="sweep", config="local")
    with pytest.raises(InvalidInput, match=r"belongs to .*; give another run_dir"):
        campaign.start()
    with pytest.raises(InvalidInput, match="belongs to"), driver_lock(squatted):
        pass
    with pytest.raises(InvalidInput, match="belongs to"):
        RunStore.create(squatted, {}, [])
    assert victim.read_text() == "five years of work"


@as_two_users
def test_a_file_system_that_gives_files_to_others_is_refused_by_name(tmp_path: Path) -> None:
    made = tmp_path / "run"
    made.mkdir()
    give(made)
    with pytest.raises(InvalidInput, match="its file system gives files to another user; choose a run directory on"):
        check_new_run_directory(made, made=True)


@pytest.mark.parametrize("name", ["driver.lock", "notebook.lock"])
def test_locks_do_not_follow_links(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "results.txt"
    victim.write_text("five years of work")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(victim)
    lock = (lambda: driver_lock(run).__enter__()) if name == "driver.lock" else (lambda: take_control(run))
    with pytest.raises(InvalidInput, match=f"{name} is a symbolic link"):
        lock()
    assert victim.read_text() == "five years of work"


@pytest.mark.parametrize("name", [STATE_FILE, "assignment.json", "logs/t.log"])
@pytest.mark.parametrize("kind", ["pipe", "link", "deep"])
def test_odd_files_of_a_run_end_in_one_line(shared: Path, name: str, kind: str) -> None:
    run = plant(shared / "run")
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000)
    calls = {
        STATE_FILE: lambda: MoverState.read(run),
        "assignment.json": lambda: Assignment.read(path),
        "logs/t.log": lambda: list(log_lines(run, "t")),
    }
    if name == "logs/t.log" and kind == "deep":
        assert calls[name]() == []
        return
    with pytest.raises(FreeTrainError) as error:
        calls[name]()
    assert "\n" not in str(error.value)


@as_two_users
def test_what_others_have_left_in_a_new_run_directory_is_refused(tmp_path: Path) -> None:
    """A compiled module there would be imported instead of the app that was written and hashed."""
    run = tmp_path / "run"
    (run / "notebook" / "__pycache__").mkdir(parents=True)
    give(run / "notebook")
    with pytest.raises(InvalidInput, match=r"run/notebook is a directory of .*; choose another directory"):
        make_run_directory(run, datetime.now(timezone.utc))


def test_a_damaged_journal_of_a_living_driver_does_not_end_status(shared: Path) -> None:
    run = plant(shared / "run")
    journal = run / "parsl" / "000" / "freetrain" / "journal.sqlite"
    journal.parent.mkdir(parents=True)
    change(
        journal,
        "CREATE TABLE event (id INTEGER PRIMARY KEY, time, kind, subject, detail);"
        "CREATE TABLE progress (training, time, detail);",
    )
    change(journal, "INSERT INTO event VALUES (1, 1.0, 'starts_failed', 'x', ?)", "[" * 100_000)
    host, pid, started = own_identity()
    add_driver(run, journal=str(journal), host=host, pid=pid, started=started, ended=None)
    done = freetrain("status", str(run))
    assert done.exit_code == 0
    assert "camp: 0 of 1 training jobs finished" in done.output


@pytest.mark.parametrize("command", ["run campaign.yaml", "check job.py:train", "check job:train"])
def test_an_app_beside_which_anybody_can_put_modules_is_refused(shared: Path, command: str) -> None:
    (shared / "campaign.yaml").write_text("name: camp\ntrainings: [{app: 'job.py:train'}]\n")
    (shared / "job.py").write_text(
        "import quopri\nfrom freetrain_parsl import training_app\n\n\n@training_app\ndef train(session): return 1\n"
    )
    (shared / "quopri.py").write_text("open('planted', 'w')")  # hides the one of the standard library
    sys.modules.pop("quopri", None)
    done = freetrain(*command.split())
    assert done.exit_code == 2
    assert f"{shared} can be changed by any user (mode 1777), who could put a json.py or torch.py there" in done.output
    assert not (shared / "planted").exists()


@pytest.mark.parametrize(
    ("made", "hint"),
    [
        ("results/exp1/campaign.sqlite", "as it was given to --run-dir"),
        ("exp1/campaign.sqlite", "such as exp1"),
        ("campaign.sqlite", "such as ."),
        ("runinfo/007/parsl.log", "such as runinfo/007"),
    ],
)
def test_without_a_run_of_the_default_name_it_is_said_where_was_looked_and_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, hint: str
) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        find_run(None)
    assert str(caught.value) == f"there is no freetrain-run-… in {tmp_path}; give the run directory, {hint}"
