"""A whole state is written by the first member alone: in the background, or while the training job waits."""

from __future__ import annotations

import errno
import logging
import resource
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from controlled_manager import ControlledManager

from freetrain_parsl.errors import StorageUnavailable
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.group.process_group import Group
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path) -> Any:
    return torch.load(path / "state.pt", weights_only=True)["objects"]["weight"]


def test_a_periodic_save_returns_before_it_is_written_and_counts_once_it_is(controlled: ControlledManager) -> None:
    controlled.may_write.clear()
    controlled.save(1)
    assert controlled.manager.busy
    controlled.manager.poll()
    assert controlled.manager.newest is None
    controlled.settle()
    assert controlled.manager.newest is None  # until the training job polls
    controlled.manager.poll()
    assert controlled.manager.newest is not None
    assert controlled.manager.newest.step == 1
    assert not controlled.manager.busy


def test_what_the_training_does_while_it_is_written_is_not_in_it(controlled: ControlledManager) -> None:
    controlled.may_write.clear()
    controlled.save(1)
    controlled.weight += 5
    controlled.settle()
    controlled.manager.poll()
    assert read(controlled.manager.newest.path).tolist() == [0.0] * 4


def test_a_periodic_save_is_skipped_while_one_is_written(controlled: ControlledManager) -> None:
    """Not even its state is created."""
    controlled.may_write.clear()
    controlled.save(1)
    controlled.save(2)
    assert controlled.states == 1
    assert not controlled.manager.due(controlled.clock() + 1000)
    controlled.settle()
    assert controlled.steps() == [1]


def test_a_last_save_waits_for_the_one_that_is_written(controlled: ControlledManager) -> None:
    controlled.may_write.clear()
    controlled.save(1)
    threading.Timer(0.05, controlled.may_write.set).start()
    controlled.save(2, wait=True)
    assert controlled.steps() == [2, 1]
    assert controlled.manager.newest.step == 2


def test_a_state_that_is_being_written_is_not_written_again(controlled: ControlledManager) -> None:
    """But if that write fails, the last save writes the state."""
    controlled.save(1, mark=(1, 0))
    controlled.save(1, wait=True, mark=(1, 0))
    assert controlled.steps() == [1]
    controlled.fail(errno.ENOSPC)
    controlled.save(2, mark=(2, 0))
    controlled.settle()
    controlled.problem = None
    controlled.save(2, wait=True, mark=(2, 0))
    assert controlled.steps() == [2, 1]


def test_other_members_neither_write_nor_make_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ControlledManager(tmp_path, monkeypatch, group=Group(1, 2))
    other.save(1)
    other.save(2, wait=True)
    other.manager.close()
    assert (other.states, list(tmp_path.iterdir())) == (0, [])


def test_closing_waits_for_the_write(controlled: ControlledManager) -> None:
    controlled.may_write.clear()
    controlled.save(1)
    threading.Timer(0.05, controlled.may_write.set).start()
    controlled.manager.close()
    assert controlled.manager.newest.step == 1
    assert not list(controlled.manager.path.glob(".tmp-*"))


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


@pytest.mark.slow
def test_the_interpreter_waits_for_a_write_when_it_exits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVES_AND_ENDS, str(tmp_path)], check=True)
    assert (tmp_path / "net" / "latest").read_text() == "step-0000000001\n"


def test_the_time_until_a_save_is_durable_includes_the_rest_of_the_one_that_is_written(
    controlled: ControlledManager,
) -> None:
    controlled.manager.assume_size(490_000_000)
    alone = controlled.manager.write_seconds_estimate
    controlled.may_write.clear()
    controlled.save(1)
    assert controlled.manager.write_seconds_estimate == pytest.approx(2 * alone)
    controlled.clock.now += 4.0
    assert controlled.manager.write_seconds_estimate == pytest.approx(2 * alone - 4)


def test_a_save_that_has_to_be_made_is_told_by_its_cause_if_it_fails(controlled: ControlledManager) -> None:
    controlled.fail(errno.ENOSPC)
    with pytest.raises(StorageUnavailable, match=f"step 3 in {controlled.manager.path}: No space left on device"):
        controlled.save(3, wait=True)


def test_a_failure_that_nobody_will_look_at_any_more_is_told_at_the_end(
    controlled: ControlledManager, caplog: pytest.LogCaptureFixture
) -> None:
    controlled.fail(errno.ENOSPC)
    controlled.save(1)
    controlled.manager.close()
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
        checkpoint_manager._saver._background._running.result(20)
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
            checkpoint_manager._saver._background._running.result(20)
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
