"""Who may write, when a save is due, and what follows from one that failed."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from controlled_manager import ControlledManager

from freetrain_parsl.errors import CheckpointError, PeerFailed, TrainingError
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from pathlib import Path


# ── the writer ────────────────────────────────────────────────────────────────────────────────────


def test_the_next_first_member_shuts_out_the_one_before(
    tmp_path: Path, controlled: ControlledManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The former first member was considered failed, and resumes in the middle of a write."""
    controlled.may_write.clear()
    controlled.save(5)
    heir = ControlledManager(tmp_path, monkeypatch, group=Group(1, 2, 0))
    heir.group = Group(0, 1, 1)
    heir.manager.rejoin()
    controlled.settle()
    controlled.manager.poll()
    assert "another process has taken over (generation 1" in caplog.text
    heir.save(4, wait=True)
    assert heir.steps() == [4]
    heir.manager.close()


def test_the_next_first_member_knows_the_newest_checkpoint(
    tmp_path: Path, controlled: ControlledManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled.save(5, wait=True)
    heir = ControlledManager(tmp_path, monkeypatch, group=Group(0, 1, 1))
    heir.manager.rejoin()
    assert heir.manager.newest.step == 5
    heir.manager.close()


def test_a_first_member_that_stays_goes_on_writing_in_the_new_group(controlled: ControlledManager) -> None:
    """Its background write survives a change of the group."""
    controlled.may_write.clear()
    controlled.save(1)
    controlled.group = Group(0, 1, 1)
    controlled.manager.rejoin()
    controlled.settle()
    controlled.save(2, wait=True)
    assert controlled.steps() == [2, 1]
    assert "generation 1" in (controlled.manager.path / "writer").read_text()


# ── when ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_stated_interval_runs_from_the_beginning_of_one_save_to_that_of_the_next(
    controlled: ControlledManager,
) -> None:
    start = controlled.clock()
    assert not controlled.manager.due(start)
    assert not controlled.manager.due(start + 9)
    assert controlled.manager.due(start + 10)
    controlled.save(1)
    controlled.settle()
    controlled.manager.poll()
    assert not controlled.manager.due(start + 19)
    assert controlled.manager.due(start + 20)


def test_without_a_stated_interval_it_follows_from_the_measured_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that blocks the training job for 2 s, and a failure every hour: about sqrt(2·2·3600) s = 120 s."""
    controlled = ControlledManager(tmp_path, monkeypatch)
    controlled.manager._schedule.measured(blocked=2.0, slowdown=0.0)
    assert controlled.manager.interval.total_seconds() == pytest.approx(121, abs=2)
    controlled.manager._checkpoints._write_seconds.append(100.0)
    assert controlled.manager.interval == timedelta(seconds=2 * 150)  # twice the maximum write time
    controlled.manager.close()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def fail_in_background(controlled: ControlledManager, step: int) -> None:
    controlled.save(step)
    controlled.settle()
    controlled.manager.poll()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_background_write_that_fails_is_told_with_its_cause_and_the_next_try(
    controlled: ControlledManager, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    controlled.save(1, wait=True)
    controlled.fail(code)
    fail_in_background(controlled, 2)
    where = f"training job net: cannot write a checkpoint of step 2 in {controlled.manager.path}"
    assert caplog.messages == [f"{where}: {os.strerror(code)}; training continues, next attempt in 0:00:10"]
    assert controlled.steps() == [1]


def test_tries_become_rare_and_a_success_makes_them_regular_again(controlled: ControlledManager) -> None:
    controlled.save(1, wait=True)
    controlled.fail(errno.ENOSPC)
    seconds = []
    for step in range(2, 12):
        fail_in_background(controlled, step)
        seconds.append(controlled.manager.interval.total_seconds())
    assert seconds == [10, 20, 40, 80, 160, 320, 640, 640, 640, 640]
    controlled.problem = None
    controlled.save(20, wait=True)
    assert controlled.manager.interval == timedelta(seconds=10)


def test_a_cause_is_warned_of_once_and_again_after_a_success(
    controlled: ControlledManager, caplog: pytest.LogCaptureFixture
) -> None:
    controlled.save(1, wait=True)
    for step, code in enumerate((errno.ENOSPC, errno.ENOSPC, errno.EROFS, errno.ENOSPC, 0, errno.ENOSPC), 2):
        controlled.problem = None
        if code:
            controlled.fail(code)
        fail_in_background(controlled, step)
    warned = [text.partition(": ")[2].split(" in ")[0] for text in caplog.messages]
    assert warned == [f"cannot write a checkpoint of step {step}" for step in (2, 4, 7)]


def test_a_training_whose_checkpoints_are_too_large_for_any_file_comes_to_a_clear_end(
    controlled: ControlledManager,
) -> None:
    controlled.fail(errno.EFBIG)
    for step in range(1, 5):
        fail_in_background(controlled, step)
    controlled.save(5)
    controlled.settle()
    with pytest.raises(TrainingError, match=r"none of 5 checkpoints could be written .*File too large.*free space"):
        controlled.manager.poll()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_directory_that_cannot_be_used_for_now_never_ends_a_training(
    controlled: ControlledManager, code: int
) -> None:
    """Even if there has never been a checkpoint; the problem is reported until a save succeeds."""
    controlled.fail(code)
    for step in range(1, 9):
        fail_in_background(controlled, step)
    assert controlled.manager.storage_problem.startswith(f"the checkpoint directory {controlled.manager.path.parent} ")
    assert controlled.manager.storage_problem.endswith(f"({errno.errorcode[code]})")
    controlled.problem = None
    fail_in_background(controlled, 9)
    assert (controlled.manager.storage_problem, controlled.steps()) == ("", [9])


def save_last(controlled: ControlledManager, step: int, *, patiently: bool) -> None:
    controlled.manager.save_last(controlled.state, patiently=patiently, step=step, epoch=0, reason="test")


def test_a_fragment_that_has_to_end_on_a_full_disk_ends_and_says_which_checkpoint_remains(
    controlled: ControlledManager, caplog: pytest.LogCaptureFixture
) -> None:
    controlled.save(1, wait=True)
    controlled.fail(errno.ENOSPC)
    save_last(controlled, 3, patiently=False)
    assert controlled.steps() == [1]
    assert f"ends without a checkpoint of step 3; the newest is {controlled.manager.newest.path}" in caplog.text


def test_the_last_state_of_a_training_is_saved_when_the_disk_has_room_again(
    controlled: ControlledManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            controlled.problem = None

    monkeypatch.setattr(time, "sleep", sleep)
    controlled.fail(errno.ENOSPC)
    save_last(controlled, 3, patiently=True)
    assert (controlled.steps(), pauses) == ([3], [0.5, 1.0, 2.0])


def test_a_disk_that_stays_full_does_not_keep_a_training_from_its_end(
    controlled: ControlledManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    controlled.fail(errno.ENOSPC)
    save_last(controlled, 3, patiently=True)
    assert 20 < sum(pauses) < 40
    assert "ends without a checkpoint of step 3; no checkpoint exists" in caplog.text


def test_an_error_that_no_waiting_mends_is_raised_at_the_end(controlled: ControlledManager) -> None:
    controlled.fail(errno.EFBIG)
    with pytest.raises(CheckpointError, match="File too large"):
        save_last(controlled, 3, patiently=True)


def test_a_directory_that_cannot_be_taken_over_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training job continues in the new group; the next checkpoint retries."""
    heir = ControlledManager(tmp_path, monkeypatch, group=Group(0, 1, 1))
    heir.fail(errno.EROFS)
    heir.manager.rejoin()
    assert "Read-only file system; training continues" in caplog.text
    heir.problem = None
    heir.save(1, wait=True)
    assert heir.steps() == [1]
    heir.manager.close()


def test_a_member_that_fails_while_the_write_before_is_finished_is_no_failed_save(
    controlled: ControlledManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group must learn of it; nothing is saved without that member."""

    def finish() -> None:
        raise PeerFailed("connection closed")

    monkeypatch.setattr(controlled.manager._saver, "finish", finish)
    with pytest.raises(PeerFailed):
        controlled.save(5, wait=True)
    assert controlled.steps() == []
