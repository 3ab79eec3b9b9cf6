"""A checkpoint directory that is temporarily unusable ends neither training jobs nor the driver."""

from __future__ import annotations

import errno
import io
import logging
import os
import sqlite3
import stat
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from parsl.serialize import serialize

from freetrain_parsl.errors import InvalidInput, StorageUnavailable
from freetrain_parsl.executor.driver.storage_watch import StorageWatch
from freetrain_parsl.executor.journal import Journal, read_journal, read_progress
from freetrain_parsl.executor.run_directory import RunLog, keep_private
from freetrain_parsl.planning import events as ev
from freetrain_parsl.protocol.journal import Checkpoint, TrainingFailed
from freetrain_parsl.protocol.messages import StartRun
from freetrain_parsl.protocol.reports import (
    PauseReason,
    PeersFailed,
    Progress,
    RunFinished,
    RunPaused,
    StorageFailed,
)
from freetrain_parsl.report.projection.run import RunState
from tests.executor.stage import kinds
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.executor.stage import Stage

FULL = "the checkpoint directory /ck is full (ENOSPC)"


class Disk:
    """The probe of `StorageWatch`: works or fails, at once or when released by the test."""

    def __init__(self) -> None:
        self.works = False
        self.answers = threading.Event()
        self.answers.set()
        self.looks = 0

    def look(self) -> None:
        self.looks += 1
        assert self.answers.wait(30)
        if not self.works:
            raise StorageUnavailable("cannot write checkpoints in /ck: full", FULL)


@pytest.fixture
def disk(stage: Stage) -> Disk:
    disk = Disk()
    stage.manager._storage = StorageWatch(disk.look, lambda: stage.now)
    return disk


def settle(stage: Stage) -> list[Any]:
    """Let the training manager converge until the result of a started probe has been handled."""
    sent = stage.turn()
    look = stage.manager._storage._look
    if look is not None:
        look._thread.join(30)
        sent += stage.turn()
    return sent


def refuse_to_start(stage: Stage, *slots: str) -> None:
    for slot in slots:
        stage.ends(slot, StorageFailed(f"cannot prepare: {FULL}", FULL))


def told(stage: Stage, kind: str) -> list[dict[str, Any]]:
    return [entry.detail for _, entry in stage.history() if entry.kind == kind]


def test_a_training_that_cannot_start_on_a_full_disk_waits_and_takes_no_nodes(stage: Stage, disk: Disk) -> None:
    future = stage.submit()
    stage.on("n0", "n1")
    refuse_to_start(stage, "s0", "s1")
    assert not future.done()
    assert stage.on("n0", "n1") == []
    assert [event for event in stage.events if isinstance(event, ev.TrainerWithheld)] == [ev.TrainerWithheld(0.0, "t")]
    assert told(stage, "training_waits") == [{"reason": FULL, "until": 5.0}]


def test_it_tries_again_when_the_disk_has_room_and_trains(stage: Stage, disk: Disk) -> None:
    future = stage.submit()
    stage.on("n0")
    refuse_to_start(stage, "s0")
    stage.events.clear()
    disk.works = True
    settle(stage)
    assert disk.looks == 0, "the next attempt is not due yet"
    stage.now = 5.0
    settle(stage)
    assert [event for event in stage.events if isinstance(event, ev.TrainerSubmitted)]
    assert kinds(stage.on("n2")) == [("s2", "run")]
    stage.progress("s2")
    stage.ends("s2", RunFinished(stage.report()), serialize("value"))
    assert future.result(0) == "value"


def test_attempts_become_rare_while_the_disk_stays_full(stage: Stage, disk: Disk) -> None:
    stage.submit()
    stage.on("n0")
    refuse_to_start(stage, "s0")
    pauses = []
    for _ in range(9):
        until = told(stage, "training_waits")[-1]["until"]
        pauses.append(until - stage.now)
        stage.now = until
        settle(stage)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]


def test_a_training_that_fails_to_start_again_waits_longer(stage: Stage, disk: Disk) -> None:
    """The disk had space for the probe, but not for the training job."""
    stage.submit()
    stage.on("n0")
    refuse_to_start(stage, "s0")
    disk.works = True
    stage.now = 5.0
    settle(stage)
    stage.on("n0")
    refuse_to_start(stage, "s0")
    assert told(stage, "training_waits")[-1]["until"] == 5.0 + 10.0


def test_a_member_that_pauses_while_its_group_is_abandoned_changes_nothing(stage: Stage, disk: Disk) -> None:
    """Its node closes just when another member has found the disk full."""
    stage.running("n0", "n1")
    stage.ends("s0", StorageFailed(f"cannot save: {FULL}", FULL))
    stage.ends("s1", RunPaused(PauseReason.CLOSING, stage.report(step=1)))
    assert told(stage, "training_waits")
    disk.works = True
    stage.now = 5.0
    settle(stage)
    assert {type(message) for _, message in stage.on("n0")} == {StartRun}


def test_a_mount_that_hangs_holds_nobody_but_who_waits_for_it(stage: Stage, disk: Disk) -> None:
    stage.submit()
    stage.on("n0")
    refuse_to_start(stage, "s0")
    disk.answers.clear()
    stage.now = 5.0
    stage.turn()
    stage.now = 40.0
    stage.turn()
    assert told(stage, "training_waits")[-1]["reason"] == "it does not answer"
    disk.works = True
    disk.answers.set()
    stage.manager._storage._look._thread.join(30)
    stage.now = 60.0
    settle(stage)
    assert told(stage, "training_tries_again") == [{}]


def test_one_member_without_its_mount_takes_the_others_off_their_nodes(stage: Stage, disk: Disk) -> None:
    future = stage.submit()
    stage.on("n0", "n1")
    stage.sent.clear()
    refuse_to_start(stage, "s1")
    assert stage.place("s0") == (None, 0, True)
    stage.ends("s0", PeersFailed(0, "dismissed"))
    assert stage.on("n0") == []
    assert not future.done()


def test_progress_that_arrives_after_the_failure_does_not_end_the_wait(stage: Stage, disk: Disk) -> None:
    """The first member still trained when another could not use the directory."""
    stage.submit()
    stage.on("n0", "n1")
    refuse_to_start(stage, "s1")
    stage.progress("s0")
    stage.ends("s0", PeersFailed(0, "dismissed"))
    stage.events.clear()
    disk.works, stage.now = True, 5.0
    settle(stage)
    assert [event for event in stage.events if isinstance(event, ev.TrainerSubmitted)]


def test_the_state_of_a_run_tells_who_waits_and_until_when(stage: Stage, disk: Disk) -> None:
    stage.submit()
    stage.on("n0")
    refuse_to_start(stage, "s0")
    stage.journal.commit()
    training = RunState(stage.journal.path).refresh().trainings["t"]
    assert training.remark(now=2.0) == f"waits: {FULL}, next attempt in 3 s"
    disk.works = True
    stage.now = 5.0
    settle(stage)
    stage.journal.commit()
    assert RunState(stage.journal.path).refresh().trainings["t"].remark(now=6.0) == ""


def test_a_training_that_cannot_save_goes_on_and_says_so(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.running("n0")
    stage.progress("s0", step=2, storage_problem=FULL, next_save=20.0)
    stage.progress("s0", step=3, storage_problem=FULL, next_save=19.0)
    stage.journal.commit()
    training = RunState(stage.journal.path).refresh().trainings["t"]
    assert (training.state, training.remark(now=0.0)) == (
        "running",
        f"cannot save: {FULL}, next attempt in 19 s",
    )
    assert caplog.text.count("training job t cannot save") == 1
    stage.progress("s0", step=4)
    assert [len(told(stage, kind)) for kind in ("saving_fails", "saving_works")] == [1, 1]


# The journal.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FullDatabase:
    """Simulates a connection whose disk is full: sqlite's own error at a commit."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __enter__(self) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no transaction."""

    def close(self) -> None:
        self.real.close()


def test_a_journal_on_a_full_disk_keeps_its_entries_and_writes_them_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    journal = Journal(tmp_path / "journal.sqlite", clock)
    real = journal._database
    journal._database = FullDatabase(real)
    for number in range(3):
        journal.write(float(number), Checkpoint("t", number))
        journal.keep_progress(float(number), "t", Progress(step=number))
        journal.commit()
        clock.now += 5.0
    assert caplog.text.count("database or disk is full; trying again") == 1
    assert list(read_journal(journal.path)) == []
    journal._database = real
    clock.now += 100.0
    journal.commit()
    assert [entry.detail["step"] for _, entry in read_journal(journal.path)] == [0, 1, 2]
    assert read_progress(journal.path)["t"]["step"] == 2
    assert "can be written again; 0 entries were lost" in caplog.text
    journal.close()


def test_a_journal_on_a_real_disk_that_fills_up_survives_and_loses_nothing(tmp_path: Path) -> None:
    clock = Clock()
    with small_disk(tmp_path / "small", "512k") as directory:
        journal = Journal(directory / "journal.sqlite", clock)
        fill(directory / "filler")
        for number in range(400):
            journal.write(float(number), TrainingFailed("t", "x" * 200))
            journal.commit()
            clock.now += 0.1
        (directory / "filler").unlink()
        clock.now += 100.0
        journal.commit()
        times = [entry.time for _, entry in read_journal(journal.path)]
        assert times == [float(number) for number in range(400)]
        journal.close()


def test_a_journal_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="choose a run directory with free space") as caught:
        Journal(tmp_path / "missing" / "journal.sqlite")
    assert "\n" not in str(caught.value)


# Files of the run.


class BrokenStream(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if not self.closed:  # as a file: closed once, whether or not its last lines can be written
            super().close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_on_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path / "run.log")
    assert stat.S_IMODE((tmp_path / "run.log").stat().st_mode) == 0o600
    log.setStream(BrokenStream()).close()
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    for _ in range(3):
        log.handle(logging.makeLogRecord({"msg": "a line"}))
    log.close()
    assert said.getvalue() == f"freetrain: cannot log to {tmp_path}/run.log: No space left on device\n"


def test_all_files_of_a_run_are_private_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "parsl").mkdir(mode=0o755)
    (tmp_path / "parsl" / "parsl.log").write_text("")
    (tmp_path / "parsl" / "parsl.log").chmod(0o644)
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.write_text("")
    elsewhere.chmod(0o644)
    (tmp_path / "link").symlink_to(elsewhere)
    keep_private(tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "parsl", tmp_path)} == {0o700}
    assert stat.S_IMODE((tmp_path / "parsl" / "parsl.log").stat().st_mode) == 0o600
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644, "the target of a link is left alone"


def test_a_log_line_with_the_bytes_of_a_file_name_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = RunLog(tmp_path / "log")
    handler.emit(logging.LogRecord("x", logging.INFO, __file__, 1, "no caf\udce9 here", None, None))
    handler.close()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "no caf\\udce9 here\n"
    assert not capsys.readouterr().err
