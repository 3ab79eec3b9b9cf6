"""The first member writes in the background: cost, completion, and handling of failures."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from training_runs import Clock

from freetrain_parsl.errors import (
    CheckpointError,
    CheckpointMismatch,
    CodeChanged,
    StorageUnavailable,
    TrainingError,
)
from freetrain_parsl.protocol.options import Code, SessionOptions
from freetrain_parsl.storage.entry import sign_manifest
from freetrain_parsl.storage.root import check_writable, identify_root
from freetrain_parsl.training.checkpoints.format import Checkpoints
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.group.process_group import Group
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Kept:
    """A checkpoint manager whose writes the test controls, with a fake clock."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, *, group: Group | None = None, **options: Any
    ) -> None:
        self.clock = Clock()
        self.group = group or Group()
        self.may_write = threading.Event()
        self.may_write.set()
        self.problem: OSError | None = None
        self.states = 0
        self.weight = torch.zeros(4)
        self.checkpoint_manager = CheckpointManager(
            SessionOptions("net", root, **options), lambda: self.group, clock=self.clock
        )
        real_save = Checkpoints.save

        def save(checkpoints: Checkpoints, *args: Any, **kwargs: Any) -> Any:
            assert self.may_write.wait(20)
            return real_save(checkpoints, *args, **kwargs)

        monkeypatch.setattr(Checkpoints, "save", save)
        fsync = os.fsync

        def sync(descriptor: int) -> None:
            if self.problem is not None:
                raise self.problem
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", sync)

    def state(self) -> dict[str, Any]:
        self.states += 1
        return {"objects": {"weight": self.weight}}

    def save(self, step: int, *, wait: bool = False, **options: Any) -> None:
        self.checkpoint_manager.save(self.state, step=step, epoch=0, reason="test", wait=wait, **options)

    def settle(self) -> None:
        """Let the background write end, successfully or not."""
        self.may_write.set()
        self.checkpoint_manager._background._running.result(20)

    def fail(self, code: int) -> None:
        self.problem = OSError(code, os.strerror(code))

    def steps(self) -> list[int]:
        return [entry.step for entry in self.checkpoint_manager._directory.entries()]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    kept = Kept(tmp_path, monkeypatch, checkpoint_interval=timedelta(seconds=10))
    kept.checkpoint_manager.restore()
    yield kept
    kept.may_write.set()
    kept.problem = None
    kept.checkpoint_manager.close()


def read(path: Path) -> Any:
    return torch.load(path / "state.pt", weights_only=True)["objects"]["weight"]


# ── in the background ─────────────────────────────────────────────────────────────────────────────


def test_a_periodic_save_returns_before_it_is_written_and_counts_once_it_is(kept: Kept) -> None:
    kept.may_write.clear()
    kept.save(1)
    assert kept.checkpoint_manager.busy
    kept.checkpoint_manager.poll()
    assert kept.checkpoint_manager.newest is None
    kept.settle()
    assert kept.checkpoint_manager.newest is None  # until the training polls
    kept.checkpoint_manager.poll()
    assert kept.checkpoint_manager.newest is not None
    assert kept.checkpoint_manager.newest.step == 1
    assert not kept.checkpoint_manager.busy


def test_what_the_training_does_while_it_is_written_is_not_in_it(kept: Kept) -> None:
    kept.may_write.clear()
    kept.save(1)
    kept.weight += 5
    kept.settle()
    kept.checkpoint_manager.poll()
    assert read(kept.checkpoint_manager.newest.path).tolist() == [0.0] * 4


def test_a_periodic_save_is_skipped_while_one_is_written(kept: Kept) -> None:
    """Not even its state is created."""
    kept.may_write.clear()
    kept.save(1)
    kept.save(2)
    assert kept.states == 1
    assert not kept.checkpoint_manager.due(kept.clock() + 1000)
    kept.settle()
    assert kept.steps() == [1]


def test_a_last_save_waits_for_the_one_that_is_written(kept: Kept) -> None:
    kept.may_write.clear()
    kept.save(1)
    threading.Timer(0.05, kept.may_write.set).start()
    kept.save(2, wait=True)
    assert kept.steps() == [2, 1]
    assert kept.checkpoint_manager.newest.step == 2


def test_a_state_that_is_being_written_is_not_written_again(kept: Kept) -> None:
    """But if that write fails, the last save writes the state."""
    kept.save(1, mark=(1, 0))
    kept.save(1, wait=True, mark=(1, 0))
    assert kept.steps() == [1]
    kept.fail(errno.ENOSPC)
    kept.save(2, mark=(2, 0))
    kept.settle()
    kept.problem = None
    kept.save(2, wait=True, mark=(2, 0))
    assert kept.steps() == [2, 1]


def test_other_members_neither_write_nor_make_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Kept(tmp_path, monkeypatch, group=Group(1, 2))
    other.save(1)
    other.save(2, wait=True)
    other.checkpoint_manager.close()
    assert (other.states, list(tmp_path.iterdir())) == (0, [])


def test_closing_waits_for_the_write(kept: Kept) -> None:
    kept.may_write.clear()
    kept.save(1)
    threading.Timer(0.05, kept.may_write.set).start()
    kept.checkpoint_manager.close()
    assert kept.checkpoint_manager.newest.step == 1
    assert not list(kept.checkpoint_manager.path.glob(".tmp-*"))


SAVES_AND_ENDS = """
import sys
from pathlib import Path
import torch
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.group.process_group import Group
from freetrain_parsl.protocol.options import SessionOptions
manager = CheckpointManager(SessionOptions("net", Path(sys.argv[1])), Group)
manager.restore()
manager.save(lambda: {"objects": {"w": torch.ones(2_000_000)}}, step=1, epoch=0, reason="test", wait=False)
assert manager.newest is None
"""


def test_the_interpreter_waits_for_a_write_when_it_exits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVES_AND_ENDS, str(tmp_path)], check=True)
    assert (tmp_path / "net" / "latest").read_text() == "step-0000000001\n"


def test_the_time_until_a_save_is_durable_includes_the_rest_of_the_one_that_is_written(kept: Kept) -> None:
    kept.checkpoint_manager.assume_size(490_000_000)
    alone = kept.checkpoint_manager.write_seconds_estimate
    kept.may_write.clear()
    kept.save(1)
    assert kept.checkpoint_manager.write_seconds_estimate == pytest.approx(2 * alone)
    kept.clock.now += 4.0
    assert kept.checkpoint_manager.write_seconds_estimate == pytest.approx(2 * alone - 4)


# ── the writer ────────────────────────────────────────────────────────────────────────────────────


def test_the_next_first_member_shuts_out_the_one_before(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The former first member was considered failed, and resumes in the middle of a write."""
    kept.may_write.clear()
    kept.save(5)
    heir = Kept(tmp_path, monkeypatch, group=Group(1, 2, 0))
    heir.group = Group(0, 1, 1)
    heir.checkpoint_manager.rejoin()
    kept.settle()
    kept.checkpoint_manager.poll()
    assert "another process has taken over (generation 1" in caplog.text
    heir.save(4, wait=True)
    assert heir.steps() == [4]
    heir.checkpoint_manager.close()


def test_the_next_first_member_knows_the_newest_checkpoint(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.save(5, wait=True)
    heir = Kept(tmp_path, monkeypatch, group=Group(0, 1, 1))
    heir.checkpoint_manager.rejoin()
    assert heir.checkpoint_manager.newest.step == 5
    heir.checkpoint_manager.close()


def test_a_first_member_that_stays_goes_on_writing_in_the_new_group(kept: Kept) -> None:
    """Its background write survives a change of the group."""
    kept.may_write.clear()
    kept.save(1)
    kept.group = Group(0, 1, 1)
    kept.checkpoint_manager.rejoin()
    kept.settle()
    kept.save(2, wait=True)
    assert kept.steps() == [2, 1]
    assert "generation 1" in (kept.checkpoint_manager.path / "writer").read_text()


def test_manifests_tell_where_a_checkpoint_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_manager = CheckpointManager(SessionOptions("net", tmp_path, code=OLD), lambda: Group(0, 1, 7))
    checkpoint_manager.restore()
    checkpoint_manager.save(lambda: {"objects": {}}, step=3, epoch=1, reason="test", wait=False)
    checkpoint_manager.close()
    manifest = json.loads((checkpoint_manager.newest.path / "manifest.json").read_text())
    told = {
        name: manifest[name]
        for name in ("format", "trainer", "step", "epoch", "reason", "world_size", "generation", "code")
    }
    assert told == {
        "format": 3, "trainer": "net", "step": 3, "epoch": 1, "reason": "test", "world_size": 1, "generation": 7,
        "code": OLD.identity,
    }  # fmt: skip
    assert manifest["torch"] == torch.__version__
    assert manifest["bytes"] == sum(file["bytes"] for file in manifest["files"].values())
    assert {"freetrain", "python", "written", "write_seconds", "blocked_seconds"} <= manifest.keys()


OLD = Code("app:train", {"app.train": "1", "app.LR": "1"})
NEW = Code("app:train", {"app.train": "1", "app.LR": "2", "app.augment": "3"})


def restored(tmp_path: Path, code: Code | None, **options: Any) -> tuple[CheckpointManager, int | None]:
    """Resume, with this code, from a checkpoint of step 5 of the old code."""
    before = CheckpointManager(SessionOptions("net", tmp_path, code=OLD), Group)
    before.restore()
    before.save(lambda: {"objects": {}}, step=5, epoch=0, reason="test", wait=True)
    before.close()
    after = CheckpointManager(SessionOptions("net", tmp_path, code=code, **options), Group)
    try:
        found = after.restore()
    finally:
        after.close()
    return after, None if found is None else found.entry.step


@pytest.mark.parametrize("code", [OLD, None])
def test_a_checkpoint_of_the_same_code_is_gone_on_from_without_a_word(tmp_path: Path, code: Code | None) -> None:
    checkpoint_manager, step = restored(tmp_path, code)
    assert (step, checkpoint_manager.code_note) == (5, "")


def test_a_checkpoint_of_other_code_is_refused_and_the_message_tells_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        CodeChanged, match=r"changed: app\.LR, app\.augment\); undo the change, resume .*'resume'"
    ) as caught:
        restored(tmp_path, NEW)
    assert "\n" not in str(caught.value)
    assert "training 'net'" in str(caught.value)
    assert "on_code_change='restart'" in str(caught.value)


def test_a_checkpoint_of_other_code_is_gone_on_from_if_that_was_asked_for(tmp_path: Path) -> None:
    checkpoint_manager, step = restored(tmp_path, NEW, on_code_change="resume")
    assert step == 5
    assert "was written by other code (changed: app.LR, app.augment); resuming from it" in checkpoint_manager.code_note


def test_a_restart_sets_the_checkpoints_of_other_code_aside(tmp_path: Path) -> None:
    checkpoint_manager, step = restored(tmp_path, NEW, on_code_change="restart")
    assert step is None
    aside = tmp_path / "net" / "set-aside-1"
    assert str(aside) in checkpoint_manager.code_note
    assert [path.name for path in aside.iterdir()] == ["step-0000000005"]
    again = CheckpointManager(SessionOptions("net", tmp_path, code=NEW, on_code_change="restart"), Group)
    assert again.restore() is None
    again.save(lambda: {"objects": {}}, step=1, epoch=0, reason="test", wait=True)
    again.close()
    later = CheckpointManager(SessionOptions("net", tmp_path, code=NEW, on_code_change="restart"), Group)
    assert later.restore().entry.step == 1, "it resumes from the checkpoint of the new code"
    later.close()


def test_code_of_another_python_cannot_be_compared_and_that_is_said(tmp_path: Path) -> None:
    checkpoint_manager, step = restored(tmp_path, Code("app:train", {"app.train": "9"}, "3.99"))
    assert step == 5
    assert "cannot determine whether the code has changed since" in checkpoint_manager.code_note


def test_a_call_of_edited_code_begins_anew_and_says_how_to_go_on(tmp_path: Path) -> None:
    before = CheckpointManager(SessionOptions("train-0000-aaaa", tmp_path, code=OLD, call="train-0000"), Group)
    before.restore()
    before.save(lambda: {"objects": {}}, step=5, epoch=0, reason="test", wait=True)
    before.close()
    after = CheckpointManager(SessionOptions("train-0000-bbbb", tmp_path, code=NEW, call="train-0000"), Group)
    assert after.restore() is None
    after.close()
    assert "its code has changed since train-0000-aaaa, which has a checkpoint of step 5" in after.code_note
    assert "options(name='train-0000-aaaa', on_code_change='resume')" in after.code_note


def test_another_format_is_refused_by_name(kept: Kept) -> None:
    kept.save(1, wait=True)
    path = kept.checkpoint_manager.newest.path / "manifest.json"
    manifest = kept.checkpoint_manager.newest.manifest()
    path.write_text(json.dumps({**manifest, "format": 2, "freetrain": "0.4"}))
    with pytest.raises(CheckpointMismatch, match=r"format 2, this version reads 3; resume with .*\(freetrain 0\.4\)"):
        kept.checkpoint_manager.restore()
    path.write_text(sign_manifest({**manifest, "format": 4, "freetrain": "0.9"}))
    with pytest.raises(CheckpointMismatch, match=r"format 4, this version reads 3; resume with .*\(freetrain 0\.9\)"):
        kept.checkpoint_manager.restore()


def test_a_flip_in_the_format_falls_back_to_the_checkpoint_before(kept: Kept) -> None:
    kept.save(1, wait=True)
    kept.save(2, wait=True)
    path = kept.checkpoint_manager.newest.path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    restored = kept.checkpoint_manager.restore()
    assert restored is not None
    assert (restored.entry.step, restored.refused) == (1, (str(path.parent),))


# ── when ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_stated_interval_runs_from_the_beginning_of_one_save_to_that_of_the_next(kept: Kept) -> None:
    start = kept.clock()
    assert not kept.checkpoint_manager.due(start)
    assert not kept.checkpoint_manager.due(start + 9)
    assert kept.checkpoint_manager.due(start + 10)
    kept.save(1)
    kept.settle()
    kept.checkpoint_manager.poll()
    assert not kept.checkpoint_manager.due(start + 19)
    assert kept.checkpoint_manager.due(start + 20)


def test_without_a_stated_interval_it_follows_from_the_measured_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that blocks the training for 2 s, and a failure every hour: about sqrt(2·2·3600) s = 120 s."""
    kept = Kept(tmp_path, monkeypatch)
    kept.checkpoint_manager._schedule.measured(blocked=2.0, slowdown=0.0)
    assert kept.checkpoint_manager.interval.total_seconds() == pytest.approx(121, abs=2)
    kept.checkpoint_manager._checkpoints._write_seconds.append(100.0)
    assert kept.checkpoint_manager.interval == timedelta(seconds=2 * 150)  # twice the maximum write time
    kept.checkpoint_manager.close()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def fail_in_background(kept: Kept, step: int) -> None:
    kept.save(step)
    kept.settle()
    kept.checkpoint_manager.poll()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_background_write_that_fails_is_told_with_its_cause_and_the_next_try(
    kept: Kept, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept.save(1, wait=True)
    kept.fail(code)
    fail_in_background(kept, 2)
    where = f"trainer net: cannot write a checkpoint of step 2 in {kept.checkpoint_manager.path}"
    assert caplog.messages == [f"{where}: {os.strerror(code)}; training continues, next attempt in 0:00:10"]
    assert kept.steps() == [1]


def test_tries_become_rare_and_a_success_makes_them_regular_again(kept: Kept) -> None:
    kept.save(1, wait=True)
    kept.fail(errno.ENOSPC)
    seconds = []
    for step in range(2, 12):
        fail_in_background(kept, step)
        seconds.append(kept.checkpoint_manager.interval.total_seconds())
    assert seconds == [10, 20, 40, 80, 160, 320, 640, 640, 640, 640]
    kept.problem = None
    kept.save(20, wait=True)
    assert kept.checkpoint_manager.interval == timedelta(seconds=10)


def test_a_cause_is_warned_of_once_and_again_after_a_success(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.save(1, wait=True)
    for step, code in enumerate((errno.ENOSPC, errno.ENOSPC, errno.EROFS, errno.ENOSPC, 0, errno.ENOSPC), 2):
        kept.problem = None
        if code:
            kept.fail(code)
        fail_in_background(kept, step)
    warned = [text.partition(": ")[2].split(" in ")[0] for text in caplog.messages]
    assert warned == [f"cannot write a checkpoint of step {step}" for step in (2, 4, 7)]


def test_a_training_whose_checkpoints_are_too_large_for_any_file_comes_to_a_clear_end(kept: Kept) -> None:
    kept.fail(errno.EFBIG)
    for step in range(1, 5):
        fail_in_background(kept, step)
    kept.save(5)
    kept.settle()
    with pytest.raises(TrainingError, match=r"none of 5 checkpoints could be written .*File too large.*free space"):
        kept.checkpoint_manager.poll()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_directory_that_cannot_be_used_for_now_never_ends_a_training(kept: Kept, code: int) -> None:
    """Even if there has never been a checkpoint; the problem is reported until a save succeeds."""
    kept.fail(code)
    for step in range(1, 9):
        fail_in_background(kept, step)
    assert kept.checkpoint_manager.storage_problem.startswith(
        f"the checkpoint directory {kept.checkpoint_manager.path.parent} "
    )
    assert kept.checkpoint_manager.storage_problem.endswith(f"({errno.errorcode[code]})")
    kept.problem = None
    fail_in_background(kept, 9)
    assert (kept.checkpoint_manager.storage_problem, kept.steps()) == ("", [9])


def test_a_save_that_has_to_be_made_is_told_by_its_cause_if_it_fails(kept: Kept) -> None:
    kept.fail(errno.ENOSPC)
    with pytest.raises(StorageUnavailable, match=f"step 3 in {kept.checkpoint_manager.path}: No space left on device"):
        kept.save(3, wait=True)


def save_last(kept: Kept, step: int, *, patiently: bool) -> None:
    kept.checkpoint_manager.save_last(kept.state, patiently=patiently, step=step, epoch=0, reason="test")


def test_a_fragment_that_has_to_end_on_a_full_disk_ends_and_says_which_checkpoint_remains(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.save(1, wait=True)
    kept.fail(errno.ENOSPC)
    save_last(kept, 3, patiently=False)
    assert kept.steps() == [1]
    assert f"ends without a checkpoint of step 3; the newest is {kept.checkpoint_manager.newest.path}" in caplog.text


def test_the_last_state_of_a_training_is_saved_when_the_disk_has_room_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            kept.problem = None

    monkeypatch.setattr(time, "sleep", sleep)
    kept.fail(errno.ENOSPC)
    save_last(kept, 3, patiently=True)
    assert (kept.steps(), pauses) == ([3], [0.5, 1.0, 2.0])


def test_a_disk_that_stays_full_does_not_keep_a_training_from_its_end(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    kept.fail(errno.ENOSPC)
    save_last(kept, 3, patiently=True)
    assert 20 < sum(pauses) < 40
    assert "ends without a checkpoint of step 3; no checkpoint exists" in caplog.text


def test_an_error_that_no_waiting_mends_is_raised_at_the_end(kept: Kept) -> None:
    kept.fail(errno.EFBIG)
    with pytest.raises(CheckpointError, match="File too large"):
        save_last(kept, 3, patiently=True)


def test_a_mount_that_is_missing_is_not_written_beneath(tmp_path: Path) -> None:
    """Nor is it taken for a training without checkpoints, which would start over."""
    root = tmp_path / "root"
    check_writable(root)
    checkpoint_manager = CheckpointManager(SessionOptions("net", root, root_identity=identify_root(root)), Group)
    checkpoint_manager.restore()
    checkpoint_manager.save(lambda: {"objects": {}}, step=1, epoch=0, reason="test", wait=True)
    checkpoint_manager.close()
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    with pytest.raises(StorageUnavailable, match=r"cannot use the checkpoint directory"):
        checkpoint_manager.restore()
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    assert checkpoint_manager.restore().entry.step == 1
    checkpoint_manager.close()


def test_a_directory_that_cannot_be_taken_over_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training continues in the new group; the next checkpoint retries."""
    heir = Kept(tmp_path, monkeypatch, group=Group(0, 1, 1))
    heir.fail(errno.EROFS)
    heir.checkpoint_manager.rejoin()
    assert "Read-only file system; training continues" in caplog.text
    heir.problem = None
    heir.save(1, wait=True)
    assert heir.steps() == [1]
    heir.checkpoint_manager.close()


def test_a_failure_that_nobody_will_look_at_any_more_is_told_at_the_end(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.fail(errno.ENOSPC)
    kept.save(1)
    kept.checkpoint_manager.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text


def test_the_limit_of_a_real_file_is_told_and_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint_manager = CheckpointManager(SessionOptions("net", tmp_path), Group)
    checkpoint_manager.restore()
    checkpoint_manager.save(lambda: {"objects": {}}, step=1, epoch=0, reason="test", wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        checkpoint_manager.save(
            lambda: {"objects": {"w": torch.ones(10_000)}}, step=2, epoch=0, reason="test", wait=False
        )
        checkpoint_manager._background._running.result(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoint_manager.close()
    assert "File too large" in caplog.text
    assert [path.name for path in sorted(checkpoint_manager.path.iterdir())] == ["latest", "step-0000000001", "writer"]


def test_a_full_file_system_is_told_and_leaves_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", "256k") as root:
        checkpoint_manager = CheckpointManager(SessionOptions("net", root), Group)
        checkpoint_manager.restore()
        for step, size in ((1, 1000), (2, 1_000_000), (3, 1000)):
            state = {"objects": {"w": torch.full((size,), float(step))}}
            checkpoint_manager.save(lambda state=state: state, step=step, epoch=0, reason="test", wait=False)
            checkpoint_manager._background._running.result(20)
        checkpoint_manager.close()
        assert caplog.text.count("step 2 in") == caplog.text.count("No space left on device") == 1
        assert checkpoint_manager.newest.verify()[1]["step"] == 3
        assert [path.name for path in sorted(checkpoint_manager.path.glob("*"))] == [
            "latest", "step-0000000001", "step-0000000003", "writer",
        ]  # fmt: skip


def test_a_state_that_has_to_be_saved_takes_the_room_of_older_checkpoints(tmp_path: Path) -> None:
    """On a disk filled by other files; the newest intact one is removed only once the new one exists."""
    with small_disk(tmp_path / "small", "256k") as root:
        checkpoint_manager = CheckpointManager(SessionOptions("net", root), Group)
        checkpoint_manager.restore()

        def save(step: int) -> None:
            state = {"objects": {"w": torch.full((4000,), float(step))}}
            checkpoint_manager.save(lambda: state, step=step, epoch=0, reason="test", wait=True)

        save(1)
        save(2)
        fill(root / "others")
        save(3)
        steps = [entry.step for entry in checkpoint_manager._directory.entries()]
        fill(root / "more")
        with pytest.raises(StorageUnavailable):
            checkpoint_manager.save(
                lambda: {"objects": {"w": torch.ones(40_000)}}, step=4, epoch=0, reason="test", wait=True
            )
        left = checkpoint_manager._directory.entries()
        left[0].verify()
        checkpoint_manager.close()
        assert (steps, [entry.step for entry in left]) == ([3, 2], [3])
