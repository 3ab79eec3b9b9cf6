"""The state of a run: it can be read by any process, and a driver's clean end differs from its death."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import stat
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from freetrain_parsl.campaign import store as store_module
from freetrain_parsl.campaign.directories import find_run
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.lock import DriverState, driver_lock, driver_state, is_silent, own_identity
from freetrain_parsl.campaign.orphans import remove_orphans
from freetrain_parsl.campaign.run import CampaignRun, preflight, refuse_living_driver
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.store import DATABASE, DriverRecord, RunStore
from freetrain_parsl.errors import (
    BatchSystemError,
    ClusterGone,
    CodeChanged,
    InvalidInput,
    TrainingCancelled,
    TrainingInterrupted,
)
from freetrain_parsl.report.projection.run import RunState
from tests.clock import Clock

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> RunStore:
    return RunStore.create(tmp_path, {"name": "c", "run_id": "r", "created": 1.0}, ["a", "b", "c"], clock)


def states(store: RunStore) -> list[str]:
    return [training.state for training in store.trainings()]


def test_a_result_with_numbers_of_numpy_is_kept_as_json(store: RunStore) -> None:
    store.finish("a", {"loss": np.float32(0.5), "best": [np.int64(3)]})
    store.finish("b", {"losses": np.array([0.5])})
    assert [item.result for item in store.trainings()] == [
        {"loss": 0.5, "best": [3]},
        "{'losses': array([0.5])}",
        None,
    ]


def test_a_result_that_raises_is_kept_as_a_text(store: RunStore) -> None:
    class Number:
        ndim = 0

        def item(self) -> float:
            raise RuntimeError("no data")

        def __repr__(self) -> str:
            return "Number()"

    class Unseen:
        def __repr__(self) -> str:
            raise RuntimeError("no data")

    store.finish("a", [Number()])
    store.finish("b", Unseen())
    nested: list[object] = []
    for _ in range(20_000):
        nested = [nested]
    store.finish("c", nested)
    assert [item.result for item in store.trainings()] == [
        "[Number()]",
        "<Unseen, whose representation fails: RuntimeError>",
        "<list, whose representation fails: RecursionError>",
    ]


def test_a_result_whose_methods_raise_is_kept_as_a_text(store: RunStore) -> None:
    """It ended the driver."""

    class Lazy(dict[str, int]):
        def items(self) -> Any:
            raise KeyError("not loaded")

    class Quits(dict[str, int]):
        def items(self) -> Any:
            raise SystemExit(1)

        def __repr__(self) -> str:
            raise SystemExit(1)

    store.finish("a", Lazy(b=1))
    store.finish("b", Quits(b=1))
    assert [item.result for item in store.trainings()] == [
        "{'b': 1}",
        "<Quits, whose representation fails: SystemExit>",
        None,
    ]


def test_results_can_be_read_with_little_of_the_stack_left(store: RunStore) -> None:
    """One nested result made the run unreadable."""
    nested: list[object] = []
    for _ in range(500):
        nested = [nested]
    store.finish("a", nested)

    def states_below(frames: int) -> list[str]:
        return states_below(frames - 1) if frames else states(store)

    assert states_below(500) == ["finished", "waiting", "waiting"]


def test_a_long_result_has_a_file(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view read it with the state, and one of a gigabyte was tried again for ever."""
    monkeypatch.setattr(store_module, "_LONGEST_RESULT", 100)
    store.finish("a", ["x"] * 100)
    assert store.training("a").result == "in results/a.json: list, 500 characters"
    file = store.directory / "results" / "a.json"
    assert json.loads(file.read_text()) == ["x"] * 100
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    store.finish("b", {1 + 2j: "x" * 100})
    assert store.training("b").result == "in results/b.txt: dict, 112 characters"
    assert (store.directory / "results" / "b.txt").read_text() == repr({1 + 2j: "x" * 100})
    store.finish("c", bytes(200))
    assert store.training("c").result == "in results/c.bin: bytes, 200 bytes"
    assert (store.directory / "results" / "c.bin").read_bytes() == bytes(200), "not their repr, four times as long"
    assert {path.name for path in file.parent.iterdir()} == {"a.json", "b.txt", "c.bin"}


def test_a_long_result_that_cannot_be_written_is_tried_again(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LONGEST_RESULT", 100)
    (store.directory / "results").write_text("")
    with pytest.raises(sqlite3.OperationalError, match="the result of a cannot be written"):
        store.finish("a", ["x"] * 100)
    assert store.training("a").state == "waiting"
    (store.directory / "results").unlink()
    store.finish("a", ["x"] * 100)
    assert store.training("a").state == "finished"


def test_texts_that_utf8_cannot_encode_are_escaped(store: RunStore) -> None:
    """As the name of a file in an error: they ended the driver."""
    store.beat(1, {"a": ("running", None, ["n"])}, {"a": "caf\udce9"})
    store.fail("b", "ValueError: caf\udce9", final=True)
    store.finish("c", 1, "caf\udce9")
    assert [item.remark or item.error for item in store.trainings()] == [
        "caf\\udce9",
        "ValueError: caf\\udce9",
        "caf\\udce9",
    ]


def test_a_run_directory_that_was_moved_has_its_journals(tmp_path: Path) -> None:
    """Their paths are recorded when a driver begins."""
    directory = tmp_path / "run"
    journal = directory / "parsl" / "000" / "freetrain" / "journal.sqlite"
    journal.parent.mkdir(parents=True)
    journal.touch()
    store = RunStore.create(directory, {"name": "c"}, ["a"])
    store.describe_driver(store.begin_driver("here", 1, 1), "ft-", journal)
    moved = RunStore(directory.rename(tmp_path / "moved"))
    drivers = [*moved.drivers(), moved.last_driver()]
    assert [driver.journal for driver in drivers if driver] == [
        str(tmp_path / "moved" / journal.relative_to(directory))
    ] * 2


def test_a_new_run_is_private_and_all_its_trainings_wait(store: RunStore) -> None:
    assert states(store) == ["waiting"] * 3
    assert store.fact("name") == "c"
    assert stat.S_IMODE((store.directory / DATABASE).stat().st_mode) == 0o600
    assert driver_state(store.last_driver()) is DriverState.NONE


def test_what_a_driver_tells_is_read_back(store: RunStore) -> None:
    driver = store.begin_driver(*own_identity())
    store.beat(driver, {"a": ("running", 0.25, ["n1", "n2"]), "b": ("waiting", None, [])})
    first = store.trainings()[0]
    assert (first.state, first.share, first.nodes) == ("running", 0.25, ("n1", "n2"))
    store.beat(driver, {"a": ("waiting", None, [])})
    assert store.trainings()[0].share == 0.25, "an unknown share keeps its last known value"


def test_slots_of_shared_nodes_are_written_as_those_of_the_last_driver(store: RunStore, tmp_path: Path) -> None:
    driver = store.begin_driver(*own_identity())
    slots = [f"{node}/{lane}" for node in ("n0", "n1") for lane in range(4)]
    store.beat(driver, {"a": ("running", 0.25, slots), "b": ("running", None, ["n2/3"])})
    assert [item.where for item in store.trainings()] == ["n[0-1]/0-3 (8 accelerators)", "n2/3 (1 accelerator)", ""]
    store.describe_driver(driver, "prefix", tmp_path / "journal.sqlite", 4)
    assert store.trainings()[0].where == "n[0-1] (8 accelerators)"
    assert store.trainings()[0].as_json()["where"] == "n[0-1] (8 accelerators)"


def test_results_are_json_if_they_can_be_and_a_later_beat_does_not_undo_them(store: RunStore) -> None:
    driver = store.begin_driver(*own_identity())
    store.finish("a", {"loss": 0.5})
    store.finish("b", float("nan"))
    store.fail("c", "ValueError: no", final=True)
    store.beat(driver, {name: ("running", 0.1, ["n1"]) for name in "abc"})
    assert states(store) == ["finished", "finished", "failed"]
    assert [item.result for item in store.trainings()] == [{"loss": 0.5}, "nan", None]
    assert store.trainings()[2].error == "ValueError: no"


def test_a_training_that_has_ended_or_has_no_driver_waits_for_nothing(store: RunStore) -> None:
    """`status`, the sites view and the notebook showed that a cancelled one waits for a node."""
    driver = store.begin_driver("host", 1, 1)
    remarks = dict.fromkeys("abc", "waits for a node to join")
    store.beat(driver, dict.fromkeys("abc", ("waiting", None, ())), remarks)
    store.cancel("a")
    store.fail("b", "ValueError: no", final=True)
    assert [item.remark for item in store.trainings()] == [None, None, "waits for a node to join"]
    store.end_driver(driver, "stopped")
    assert [item.remark for item in store.trainings()] == [None, None, None]


def test_what_the_site_refused_waits_and_what_failed_is_retried_on_request(store: RunStore) -> None:
    store.fail("a", "BatchSystemError: full", final=False)
    store.fail("b", "ValueError: no", final=True)
    assert states(store) == ["waiting", "failed", "waiting"]
    store.retry_failed()
    assert states(store) == ["waiting"] * 3


def test_a_request_is_for_the_present_driver_only(store: RunStore) -> None:
    store.begin_driver(*own_identity())
    assert not store.stop_requested()
    store.request_stop()
    assert store.stop_requested()
    store.begin_driver(*own_identity())
    assert not store.stop_requested()


@pytest.mark.parametrize("orderly", [True, False])
def test_whatever_ends_a_driver_what_ran_waits_for_the_next(store: RunStore, orderly: bool) -> None:
    driver = store.begin_driver(*own_identity())
    store.beat(driver, {"a": ("running", 0.5, ["n1"])})
    if orderly:
        store.end_driver(driver, "stopped")
        assert driver_state(store.last_driver()) is DriverState.ENDED
    else:
        store.begin_driver(*own_identity())
    assert states(store) == ["waiting"] * 3
    assert store.trainings()[0].nodes == ()


def record(**changes: object) -> DriverRecord:
    host, pid, started = own_identity()
    values = {"host": host, "pid": pid, "started": started, "since": 900.0, "heartbeat": 990.0, "ended": None}
    return DriverRecord(**{"id": 1, "how": None, "job_prefix": None, "journal": None, **values, **changes})


@pytest.mark.parametrize(
    ("driver", "state"),
    [
        (record(), DriverState.ALIVE),
        (record(started=own_identity()[2] - 1), DriverState.DEAD),
        (record(heartbeat=0.0), DriverState.ALIVE),
        (record(ended=995.0), DriverState.ENDED),
        (record(host="elsewhere"), DriverState.ALIVE),
        (record(host="elsewhere", heartbeat=930.0), DriverState.DEAD),
    ],
    ids=["here", "its id is another's now", "here but busy", "ended", "elsewhere", "elsewhere and silent"],
)
def test_a_driver_here_is_known_by_its_process_and_one_elsewhere_by_its_heartbeat(
    driver: DriverRecord, state: DriverState, clock: Clock
) -> None:
    assert driver_state(driver, clock) is state


def test_a_living_driver_is_not_joined_by_another(store: RunStore) -> None:
    store.begin_driver(*own_identity())
    with pytest.raises(InvalidInput, match=rf"its driver runs on {platform.node()} \(process {os.getpid()}\); stop it"):
        refuse_living_driver(store)


def test_the_lock_is_held_by_one(tmp_path: Path) -> None:
    with (
        driver_lock(tmp_path),
        pytest.raises(InvalidInput, match="another driver, or 'freetrain clean', works in"),
        driver_lock(tmp_path),
    ):
        pass
    with driver_lock(tmp_path):
        assert stat.S_IMODE((tmp_path / "driver.lock").stat().st_mode) == 0o600


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is not a run directory of 'freetrain run'"):
        RunStore(tmp_path)
    (tmp_path / DATABASE).write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(InvalidInput, match="cannot be used: file is not a database"):
        RunStore(tmp_path)


def test_a_run_of_another_version_is_refused(store: RunStore) -> None:
    database = sqlite3.connect(store.directory / DATABASE)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(InvalidInput, match=r"is of another version of FreeTrain \(format 99, not 2\)"):
        RunStore(store.directory)


def test_the_newest_run_here_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="there is no freetrain-run-… in"):
        find_run(None)
    for name, created in (("freetrain-run-z", 1.0), ("freetrain-run-a", 2.0)):
        (tmp_path / name).mkdir()
        RunStore.create(tmp_path / name, {"created": created}, [])
    assert find_run(None).name == "freetrain-run-a"
    assert find_run(tmp_path) == tmp_path


class _Queue:
    """A fake window source: jobs end `slow` polls after their cancellation."""

    def __init__(self, jobs: dict[str, str], slow: int = 0) -> None:
        self.jobs = jobs
        self.slow = slow
        self.cancelled: list[list[str]] = []

    def find_jobs(self, prefix: str) -> dict[str, str]:
        if self.cancelled:
            self.slow -= 1
            if self.slow < 0:
                self.jobs = {job: name for job, name in self.jobs.items() if job not in self.cancelled[-1]}
        return {job: name for job, name in self.jobs.items() if name.startswith(prefix)}

    def cancel(self, jobs: list[str]) -> None:
        self.cancelled.append(list(jobs))


class _Site:
    outlives_driver = True


def _run_with_two_drivers(store: RunStore) -> RunStore:
    for label in ("one", "two"):
        driver = store.begin_driver(*own_identity())
        store.describe_driver(driver, f"freetrain.{label}.r.", store.directory / "journal")
    return store


def test_orphans_of_all_drivers_are_ended_and_jobs_of_others_are_not(store: RunStore, clock: Clock) -> None:
    queue = _Queue(
        {"1": "freetrain.one.r.block-0", "2": "freetrain.two.r.block-3", "3": "freetrain.two.s.block-3", "4": "x"},
        slow=2,
    )
    told: list[str] = []
    ended = remove_orphans(
        _Site(),
        _run_with_two_drivers(store),
        told.append,
        make_source=lambda _: queue,
        clock=clock,
        sleep=clock.sleep,
    )
    assert ended == {"1": "freetrain.one.r.block-0", "2": "freetrain.two.r.block-3"}
    assert queue.cancelled == [["1", "2"]]
    assert queue.jobs.keys() == {"3", "4"}, "it waits until they are gone"
    assert "1 (freetrain.one.r.block-0)" in told[0]


def test_jobs_that_do_not_end_are_told_instead_of_a_second_driver_beside_them(store: RunStore, clock: Clock) -> None:
    queue = _Queue({"1": "freetrain.one.r.block-0"}, slow=10**6)
    with pytest.raises(BatchSystemError, match="jobs 1 were cancelled and are still there after 300 s"):
        remove_orphans(
            _Site(),
            _run_with_two_drivers(store),
            str,
            make_source=lambda _: queue,
            clock=clock,
            sleep=clock.sleep,
        )


def test_a_run_that_never_submitted_asks_nobody_and_a_cluster_that_is_gone_has_no_jobs(
    store: RunStore, clock: Clock
) -> None:
    def gone(_: object) -> object:
        raise ClusterGone("no embedded cluster 'x' is running")

    told: list[str] = []
    assert remove_orphans(_Site(), store, told.append, make_source=gone) == {}
    assert told == []
    assert remove_orphans(_Site(), _run_with_two_drivers(store), told.append, make_source=gone) == {}
    assert told == ["the cluster of this run is gone, and all jobs with it"]


def test_a_disk_without_room_for_checkpoints_is_refused(tmp_path: Path) -> None:
    site = Site.parse("system: local\ncheckpoints: {least_free: 1000000 TB}", "s.yaml", Variables({}, {}))
    with pytest.raises(InvalidInput, match=r"MB are free, fewer than the .* MB that site s requires for checkpoints"):
        preflight(site, tmp_path)


class Clocks:
    """Clocks of this host, and a driver on another host whose clock differs."""

    def __init__(self, store: RunStore, *, ahead: float, beats: bool) -> None:
        self.store = store
        self.now = 1000.0
        self.beats = beats
        store._clock = lambda: self.now + ahead
        self.driver = store.begin_driver("elsewhere", 1, 1)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.beats:
            self.store.beat(self.driver, {})

    def silent(self) -> bool:
        return is_silent(self.store, clock=lambda: self.now, monotonic=lambda: self.now, sleep=self.sleep)


@pytest.mark.parametrize("ahead", [-86400.0, -61.0, 0.0, 61.0, 86400.0])
def test_a_driver_elsewhere_that_beats_lives_whatever_its_clock_shows(store, ahead) -> None:
    assert not Clocks(store, ahead=ahead, beats=True).silent()


@pytest.mark.parametrize(("ahead", "seconds"), [(-86400.0, 10.0), (-61.0, 10.0), (86400.0, 60.0)])
def test_a_driver_elsewhere_that_does_not_beat_is_watched_and_then_dead(store, ahead, seconds) -> None:
    clocks = Clocks(store, ahead=ahead, beats=False)
    assert clocks.silent()
    assert clocks.now == 1000.0 + seconds


def test_a_driver_elsewhere_that_has_just_beaten_is_taken_for_alive(store) -> None:
    assert not Clocks(store, ahead=-30.0, beats=False).silent()


def test_what_the_driver_did_wrong_waits_and_what_the_training_did_wrong_has_failed(store) -> None:
    errors = [
        TrainingInterrupted("the interchange is dead"),
        BatchSystemError("5 attempts in a row"),
        ClusterGone("the daemon is gone"),
        CodeChanged("the checkpoint was written by other code"),
        TrainingCancelled("cancelled"),
        ValueError("no data"),
    ]
    run = CampaignRun(store, None, None)  # type: ignore[arg-type]  # not needed here
    states = []
    for error in errors:
        future: Future[object] = Future()
        future.set_exception(error)
        run._keep("a", future, run=RunState(store.directory / "journal.sqlite"))
        states.append(store.training("a").state)
        store.retry("a")
    assert states == ["waiting"] * 4 + ["cancelled", "failed"]


def test_a_journal_that_cannot_be_read_does_not_end_the_run(store: RunStore, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    journal.write_bytes(b"damaged" * 1000)
    run = CampaignRun(store, None, None)  # type: ignore[arg-type]  # not needed here
    shown: list[RunState] = []
    how = run._watch(1, RunState(journal), [], str, lambda state, _elapsed, _notes: shown.append(state))
    assert how == "finished"
    assert shown


def test_resume_says_what_it_tries_again_and_what_it_leaves_out(store) -> None:
    store.fail("a", "TrainingInterrupted: the interchange\nis dead", final=False)
    store.fail("b", "ValueError: no data", final=True)
    lines: list[str] = []
    CampaignRun(store, None, None)._report_retries(lines.append)  # type: ignore[arg-type]
    assert lines == [
        "retrying a, which was interrupted: TrainingInterrupted: the interchange is dead",
        "left out, failed: b; --retry-failed or --retry NAME retries them",
    ]
    assert store.training("a").error is None


def test_a_run_that_was_removed_is_refused_in_one_line_and_not_made_again(tmp_path):
    """Whatever is asked, by a reader that has it open; the driver takes it for an error of SQLite, and tries again."""
    directory = tmp_path / "run"
    directory.mkdir()
    store = RunStore.create(directory, {"name": "x"}, ["a"])
    (directory / "campaign.sqlite").unlink()
    for ask in (store.trainings, store.last_driver, store.request_stop, lambda: store.fact("name")):
        with pytest.raises(InvalidInput, match=r"run was removed, or its campaign\.sqlite$") as caught:
            ask()
        assert isinstance(caught.value, sqlite3.OperationalError)
    assert list(directory.iterdir()) == []


def test_a_damaged_state_is_refused_by_name(tmp_path):
    store = RunStore.create(tmp_path, {"name": "x"}, ["a"])
    (tmp_path / "campaign.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(InvalidInput, match=r"campaign\.sqlite cannot be used: file is not a database"):
        store.trainings()
