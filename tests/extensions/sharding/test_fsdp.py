"""FSDP2 in a session: sharded by the user's function, rescaled through checkpoints, with the result of a plain run."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharded_trainings import classify_sharded, shard_after_the_optimizer, shard_over_any_mesh
from training_crew import SAMPLES, run_member

from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.fragment import Finished, Membership, Paused
from freetrain_parsl.training.mailbox import Regroup

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

pytestmark = pytest.mark.slow

EPOCHS = 2


def plain(root: Path, **kwargs: Any) -> Finished:
    """Train without interruption, in this process, without sharding."""
    outcome = run_member(classify_sharded, {"shard": False, **kwargs}, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


def ends(outcomes: list[Outcome | None]) -> list[Any]:
    assert all(outcome and not outcome.error for outcome in outcomes), outcomes
    return [outcome.end for outcome in outcomes if outcome]


def assert_same(end: Any, expected: Finished) -> None:
    """Compare samples, history and parameters."""
    assert isinstance(end, Finished)
    assert (end.progress.step, end.progress.samples) == (expected.progress.step, EPOCHS * SAMPLES)
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)
    for row, other in zip(end.value["history"], expected.value["history"], strict=True):
        assert row == pytest.approx(other, abs=1e-5)
    for name, value in expected.value["parameters"].items():
        assert torch.allclose(end.value["parameters"][name], value, atol=1e-5), name


@pytest.mark.smoke
@pytest.mark.parametrize(
    "habit",
    [
        {},
        {"clip": 0.05},
        {"micro_batch": 2},
        {"batch_size": 4, "micro_batch": 1},
        {"root_too": False},
        {"validate": True},
    ],
    ids=["default", "clipped", "micro-batches", "pieces-of-one", "partly-sharded", "validated"],
)
def test_a_sharded_training_through_2_3_1_processes_ends_as_an_undisturbed_plain_one(
    crew: Crew, tmp_path: Path, habit: dict[str, Any]
) -> None:
    """The shares of 8 and of 5 samples on 3 processes are uneven; fully_shard is called on a single process too."""
    expected = plain(tmp_path / "whole", **habit)
    for size, pause_after in ((2, 4), (3, 9)):
        run = crew.run(size, tmp_path / "cut", classify_sharded, pause_after=pause_after, pause_rank=size - 1, **habit)
        paused = ends(run)
        assert [type(end) for end in paused] == [Paused] * size
        assert {(end.progress.step, end.checkpoint) for end in paused} == {(pause_after, paused[0].checkpoint)}
        assert paused[0].progress.in_place
    (end,) = ends(crew.run(1, tmp_path / "cut", classify_sharded, **habit))
    assert end.progress.resumed_from == 9
    assert_same(end, expected)


def test_a_process_without_a_part_in_a_batch_takes_part_in_the_collectives(crew: Crew, tmp_path: Path) -> None:
    """Batches of 2 samples, the last of 1, on 3 processes."""
    habit = {"batch_size": 2, "clip": 0.05}
    assert_same(ends(crew.run(3, tmp_path / "cut", classify_sharded, **habit))[0], plain(tmp_path / "whole", **habit))


def test_a_sharded_training_says_that_it_can_change_in_place(crew: Crew, tmp_path: Path) -> None:
    for size in (1, 2):
        first = crew.run(size, tmp_path / str(size), classify_sharded, epochs=1)[0]
        assert first is not None
        told = [report for report in first.reports if isinstance(report, Progress)]
        assert told
        assert all(progress.in_place for progress in told)


def test_a_lost_member_ends_the_others_which_go_back_to_the_last_checkpoint(crew: Crew, tmp_path: Path) -> None:
    """SIGKILL between two steps: the others detect it in the model's collectives, stay warm, and get other ranks."""
    ends(crew.run(2, tmp_path / "cut", classify_sharded, pause_after=4))
    outcomes = crew.run(3, tmp_path / "cut", classify_sharded, kill_after=9)
    survivors = [outcome for outcome in outcomes if outcome]
    assert [outcome.error.partition(":")[0] for outcome in survivors] == ["PeerFailed"] * 2
    assert max(outcome.seconds for outcome in survivors) < 10
    after = crew.run(2, tmp_path / "cut", classify_sharded, pause_after=11)
    assert {outcome.pid for outcome in after if outcome} == {outcome.pid for outcome in survivors}
    assert ends(after)[0].progress.resumed_from == 4
    assert_same(ends(crew.run(3, tmp_path / "cut", classify_sharded))[0], plain(tmp_path / "whole"))


@pytest.mark.parametrize("size", [1, 2])
def test_a_periodic_checkpoint_of_a_sharded_training_is_one_to_go_back_to(
    crew: Crew, tmp_path: Path, size: int
) -> None:
    """It is written in the background; one that is being written when all members die does not count."""
    options = {"checkpoint_interval": timedelta(milliseconds=1)}
    gates = {step: tmp_path / f"gate-{step}" for step in range(1, 13)}
    run = crew.start(size, tmp_path / "cut", classify_sharded, gates=gates, session_options=options)
    for step, gate in gates.items():
        run.until(gate.with_suffix(".reached").exists)
        time.sleep(0.1)  # for the write in the background, which takes longer than some of the steps
        if step < 12:
            gate.touch()
    run.until(lambda: any(entry.step > 0 for entry in CheckpointDirectory(tmp_path / "cut", "net").entries()))
    for rank in range(size):
        run.kill(rank)
    run.until(lambda: run.ended)
    end = ends(crew.run(2, tmp_path / "cut", classify_sharded))[0]
    assert 0 < end.progress.resumed_from < 12
    assert_same(end, plain(tmp_path / "whole"))
    names = {path.name.partition("-")[0] for path in (tmp_path / "cut" / "net").iterdir()}
    assert names == {"step", "latest", "writer"}


def test_a_sharded_training_cannot_be_deterministic(tmp_path: Path) -> None:
    outcome = run_member(classify_sharded, {"deterministic": True}, root=tmp_path, membership=Membership("net"))
    assert outcome.error.startswith("UsageError: session.loader: deterministic=True cannot be combined with")


def test_a_model_that_is_sharded_over_another_mesh_is_refused(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(2, tmp_path, shard_over_any_mesh)
    for outcome in outcomes:
        assert outcome is not None
        assert outcome.error.startswith("UsageError: session.prepare: the model is sharded over a mesh that does not")


def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_refused(tmp_path: Path) -> None:
    """It would change nothing: the model would stay as it is, without any error."""
    outcome = run_member(shard_after_the_optimizer, {}, root=tmp_path, membership=Membership("net"))
    assert outcome.error.startswith("UsageError: session.prepare: the optimizer has none of the model's parameters")


def test_an_order_to_leave_wakes_those_who_wait_for_a_stopped_member(crew: Crew, tmp_path: Path) -> None:
    """SIGSTOP: the model's collectives end when the slot receives the command to abort."""
    gates = {4: tmp_path / "go"}
    run = crew.start(3, tmp_path, classify_sharded, gates=gates)
    run.until(gates[4].with_suffix(".reached").exists)
    stopped, *others = run.members
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        gates[4].touch()
        with pytest.raises(TimeoutError):
            run.until(lambda: any(member.outcome for member in others), 0.5)
        for member in others:
            member.tell("order", Regroup(None, abort=True))
        run.until(lambda: all(member.outcome for member in others), 10)
        assert [member.outcome and member.outcome.error.partition(":")[0] for member in others] == ["PeerFailed"] * 2
    finally:
        os.kill(stopped.process.pid, signal.SIGKILL)
