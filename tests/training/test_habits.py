"""Ordinary PyTorch inside a session: each block of the page, on one process and in a group that changes."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from habits import BLOCKS, HELD, PAGE, assert_close, practise
from training_crew import run_member

from freetrain_parsl.protocol.reports import Joined
from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

pytestmark = pytest.mark.slow

HABITS = sorted(BLOCKS)
# Gradients are rounded to 8 or 11 bits before they are summed.
ROUNDED = {"bfloat16": 3e-2, "scaler": 1e-2}


def finished(outcome: Outcome | None) -> tuple[dict[str, Any], list[tuple[int, int]], dict[str, Any]]:
    """Return the metrics of a training job, the processes by step, and the state of all prepared objects."""
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    assert outcome.end.checkpoint is not None
    state = torch.load(outcome.end.checkpoint / "state.pt", weights_only=True)
    metrics, sizes = outcome.end.value
    # The position in a stream may differ between members.
    return metrics, sizes, {name: thing for name, thing in state["objects"].items() if not name.startswith("Stream")}


@pytest.mark.parametrize(("habit", "size"), zip(HABITS, cycle((3, 1))))
def test_a_habit_has_the_same_result_in_a_group_that_changes(crew: Crew, tmp_path: Path, habit: str, size: int) -> None:
    """Parameters, optimizers, schedulers, averages and history equal those of one process; each step is made once."""
    alone = run_member(practise, {"habit": habit}, root=tmp_path / "alone", membership=Membership("net"))
    metrics, _, state = finished(alone)
    run = crew.start(2, tmp_path / "crew", practise, habit=habit, hold_at=5)
    run.until(lambda: (tmp_path / "crew" / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(size)
    outcomes = run.outcomes()
    changed, sizes, changed_state = finished(outcomes[0])

    tolerance = 0.0 if habit == "deterministic" else ROUNDED.get(habit, 1e-4)
    assert_close(changed_state, state, tolerance)
    assert_close(changed, metrics, tolerance)
    steps = [step for step, _ in sizes] if habit != "turns" else [step for step, _ in sizes[::2]]
    assert steps == list(range(1, metrics["steps"] + 1))
    assert [size for _, size in sizes] == sorted((size for _, size in sizes), reverse=size < 2)
    assert {size for _, size in sizes} == {2, size}
    assert len(metrics["history"]) == metrics["epochs"]
    assert all(any(isinstance(report, Joined) for report in outcome.reports) for outcome in outcomes if outcome)
    for leaver in run.gone:
        assert isinstance(leaver.outcome.end, Paused)


@pytest.mark.parametrize("habit", ["carried", "deterministic", "ema", "scaler", "streaming"])
def test_a_habit_has_the_same_result_when_a_process_is_lost_in_a_step(crew: Crew, tmp_path: Path, habit: str) -> None:
    """The batch is interrupted, and once-per-step methods are not called for it."""
    alone = run_member(practise, {"habit": habit}, root=tmp_path / "alone", membership=Membership("net"))
    metrics, _, state = finished(alone)
    outcomes = crew.start(2, tmp_path / "crew", practise, habit=habit, die_at=5).outcomes()
    changed, sizes, changed_state = finished(outcomes[0])
    tolerance = 0.0 if habit == "deterministic" else ROUNDED.get(habit, 1e-4)
    assert_close(changed_state, state, tolerance)
    assert_close(changed, metrics, tolerance)
    assert sizes == [(step, 2 if step <= 5 else 1) for step in range(1, metrics["steps"] + 1)]


@pytest.mark.smoke
def test_the_log_has_each_step_once_with_the_loss_of_the_whole_batch(crew: Crew, tmp_path: Path) -> None:
    finished(run_member(practise, {"habit": "logging"}, root=tmp_path / "alone", membership=Membership("net")))
    run = crew.start(2, tmp_path / "crew", practise, habit="logging", hold_at=5)
    run.until(lambda: (tmp_path / "crew" / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(2, replace=1)
    finished(run.outcomes()[0])
    logs = []
    for who in ("alone", "crew"):
        lines = (tmp_path / who / "net" / "files" / "loss.csv").read_text(encoding="utf-8").splitlines()
        logs.append([[float(value) for value in line.split(",")] for line in lines])
    alone, changed = logs
    assert [step for step, _ in changed] == list(range(1, 29))
    for mine, expected in zip(changed, alone, strict=True):
        assert mine == pytest.approx(expected, abs=1e-4)


def test_every_block_of_the_page_is_among_those_that_are_run() -> None:
    assert PAGE.read_text(encoding="utf-8").count("```python\n") == len(HABITS) + 1  # and the common block
