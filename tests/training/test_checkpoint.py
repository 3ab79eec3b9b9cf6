"""When a training job is saved, and which checkpoints are rejected."""

from __future__ import annotations

import errno
import json
import os
import resource
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from training_crew import classify, net
from training_runs import Run, parameters, same, ticking

from freetrain_parsl.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, TrainingError
from freetrain_parsl.protocol.reports import PauseReason
from freetrain_parsl.storage.entry import sign_manifest
from freetrain_parsl.storage.posix import CheckpointDirectory, Draft
from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts
from freetrain_parsl.training.fragment import Finished, Paused

if TYPE_CHECKING:
    from pathlib import Path


def test_the_closing_time_drives_the_last_save(tmp_path: Path) -> None:
    """It stops when just a step, the margin and a write fit into the rest: not later, and not a step earlier."""
    run = Run(tmp_path, save_margin=timedelta(seconds=2))

    def function(session: Any) -> Any:
        run.mailbox.close_after(timedelta(seconds=10.5))
        return ticking(run, 1.0)(session)

    end = run(function)
    assert isinstance(end, Paused)
    assert end.reason is PauseReason.CLOSING
    assert end.progress.step == 8  # 2.5 s left; a ninth step would leave 1.5 s


def test_a_fragment_knows_from_earlier_ones_how_long_a_write_takes(tmp_path: Path) -> None:
    """A measured write of 3 s is expected to take up to 4.5 s: it stops correspondingly earlier."""
    run = Run(tmp_path, save_margin=timedelta(seconds=2))
    checkpoint = run.paused_after(3).checkpoint
    assert checkpoint is not None
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    (checkpoint / "manifest.json").write_text(sign_manifest({**manifest, "write_seconds": 3.0}))

    def function(session: Any) -> Any:
        run.mailbox.close_after(timedelta(seconds=10.5))
        return ticking(run, 1.0)(session)

    end = run(function)
    assert isinstance(end, Paused)
    assert end.progress.step == 3 + 3  # 7.5 s left: a write, the margin, and the step that is not started


def test_before_the_first_write_its_time_is_guessed_from_the_size(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, "net")
    directory.open()
    checkpoints = Checkpoints(directory, "net", keep=2)
    checkpoints.assume_size(500_000_000)
    assert checkpoints.write_seconds_estimate > 5
    checkpoints.save({}, Facts(step=1, epoch=0, reason="test"))
    assert checkpoints.write_seconds_estimate < 5


def test_a_closing_time_that_moves_away_lets_the_training_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def function(session: Any) -> Any:
        run.mailbox.close_after(timedelta(seconds=1))
        run.mailbox.close_after(None)
        return ticking(run, 1.0)(session)

    assert isinstance(run(function), Finished)


def patient(run: Run) -> Any:
    """Return `classify`, with steps of a second each, in which background writes complete."""

    def function(session: Any) -> Any:
        steps, checkpoint_manager = session.step, session._runtime.checkpoint_manager

        def slow_step(loss: torch.Tensor) -> None:
            steps(loss)
            run.clock.now += 1.0
            if checkpoint_manager.busy:
                checkpoint_manager._saver._background._running.result(20)

        session.step = slow_step
        return classify(session)

    return function


def test_periodic_checkpoints_keep_their_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=5))
    run(patient(run))
    saved = [report.checkpoint_step for report in run.reports]
    assert sorted({step for step in saved if step is not None}) == [5, 10, 15, 20, 21]


def test_two_checkpoints_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=5))
    run(patient(run))
    kept = sorted(path.name for path in (tmp_path / "net").glob("step-*"))
    assert kept == ["step-0000000020", "step-0000000021"]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make the next writes fail as on a full disk."""
    begin, failures = CheckpointDirectory.begin, iter(range(times))

    def full(directory: CheckpointDirectory, step: int) -> Draft:
        if next(failures, None) is not None:
            raise CheckpointError(f"step {step}: {os.strerror(errno.ENOSPC)}") from OSError(errno.ENOSPC, "full")
        return begin(directory, step)

    monkeypatch.setattr(CheckpointDirectory, "begin", full)


def test_periodic_saves_that_fail_are_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint is still good; the disk may have free space next time."""
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=2))
    fill_the_disk(monkeypatch, times=3)
    assert isinstance(run(patient(run)), Finished)
    assert caplog.text.count("No space left on device") == 1
    # 2, 4 and, with growing intervals, 8 fail; 16 is the next.
    assert min(report.checkpoint_step for report in run.reports if report.checkpoint_step) == 16


def test_a_training_that_can_never_save_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=0.5))
    fill_the_disk(monkeypatch, times=1000)
    with pytest.raises(TrainingError, match=r"none of 5 checkpoints could be written .*No space left on device"):
        run(patient(run))


def test_a_last_save_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_the_disk(monkeypatch, times=1000)
    with pytest.raises(CheckpointError, match="No space left on device"):
        Run(tmp_path)()


def test_a_disk_that_fills_up_inside_a_tensor_is_named_as_such(tmp_path: Path) -> None:
    """Torch's own error then only mentions an unexpected file position; the operating system's names the cause."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            Run(tmp_path)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ── damaged checkpoints, and those of other training jobs ──────────────────────────────────────────


def damage(checkpoint: Path, how: str) -> None:
    state = checkpoint / "state.pt"
    data = bytearray(state.read_bytes())
    if how == "truncated":
        state.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 2] ^= 4
        state.write_bytes(data)
    elif how == "missing":
        state.unlink()
    else:
        (checkpoint / "manifest.json").write_text("{")


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "no manifest"])
def test_a_damaged_newest_checkpoint_is_refused_by_path_and_the_one_before_is_used(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Run(tmp_path / "whole")()
    run = Run(tmp_path / "cut")
    run.paused_after(5)
    newest = run.paused_after(9).checkpoint
    assert newest is not None
    damage(newest, how)
    end = run()
    assert str(newest) in caplog.text
    assert end.progress.refused_checkpoints == (str(newest),)
    assert end.progress.resumed_from == 5
    assert same(parameters(end.checkpoint), parameters(whole.checkpoint))
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)


def test_a_damaged_checkpoint_does_not_take_the_place_of_an_intact_one(tmp_path: Path) -> None:
    """Two are kept: after the damage they are the new one and the one that was restored."""
    run = Run(tmp_path)
    run.paused_after(5)
    damaged = run.paused_after(9).checkpoint
    assert damaged is not None
    damage(damaged, "flipped")
    newest = run.paused_after(11).checkpoint
    assert newest is not None
    assert not damaged.exists()
    damage(newest, "flipped")
    assert run.paused_after(12).progress.resumed_from == 5


def test_if_all_checkpoints_are_damaged_nothing_starts_afresh(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.paused_after(5)
    run.paused_after(9)
    for checkpoint in (tmp_path / "net").glob("step-*"):
        damage(checkpoint, "flipped")
    with pytest.raises(DamagedCheckpoint, match="none of 2 checkpoints is intact"):
        run()


def test_a_training_without_steps_begins_anew_if_its_checkpoint_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Run(tmp_path / "whole")()
    run = Run(tmp_path / "cut")

    def paused_at_once(session: Any) -> Any:
        run.mailbox.pause_requested.set()
        return classify(session)

    end = run(paused_at_once)
    assert isinstance(end, Paused)
    first = end.checkpoint
    assert first is not None
    assert first.name == "step-0000000000"
    damage(first, "no manifest")
    end = run()
    assert str(first) in caplog.text
    assert same(parameters(end.checkpoint), parameters(whole.checkpoint))
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)


def other_net(session: Any) -> None:
    session.prepare(torch.nn.Linear(2, 2), torch.optim.Adam)


def other_extras(session: Any) -> None:
    session.prepare(net(), torch.optim.Adam)


@pytest.mark.parametrize(
    ("function", "kwargs", "difference"),
    [
        (classify, {"batch_size": 4}, "batch_size 8, now it is 4"),
        (classify, {"samples": 54}, "length 53, now it is 54"),
        (other_net, {}, "its model does not fit"),
        (other_extras, {}, "model, optimizer, StepLR 1, but session.prepare got model, optimizer"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    tmp_path: Path, function: Any, kwargs: dict[str, Any], difference: str
) -> None:
    run = Run(tmp_path)
    run.paused_after(5)
    with pytest.raises(CheckpointMismatch, match=difference) as caught:
        run(function, **kwargs)
    assert "\n" not in str(caught.value)


def test_another_shape_of_the_model_is_refused_in_one_line(tmp_path: Path) -> None:
    def train(session: Any, width: int) -> None:
        session.prepare(torch.nn.Linear(width, 2), torch.optim.SGD, lr=0.1)

    run = Run(tmp_path)
    run(train, width=3)
    with pytest.raises(CheckpointMismatch, match="its model does not fit") as caught:
        run(train, width=4)
    assert "\n" not in str(caught.value)


def test_another_seed_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).paused_after(5)
    with pytest.raises(CheckpointMismatch, match="seed 0, now it is 1"):
        Run(tmp_path, seed=1)()
