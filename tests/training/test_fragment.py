"""Fragments in one process: pauses, resumes, ends and reports."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from training_crew import SAMPLES, Data, classify, net
from training_runs import Run, loop, parameters, same, ticking

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.protocol.reports import PauseReason
from freetrain_parsl.training.fragment import Finished, Paused, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.training.session import TrainingSession

BATCHES = 7  # of 8 in 53 samples


@pytest.mark.parametrize("step", [1, 5, BATCHES, BATCHES + 1, 2 * BATCHES, 3 * BATCHES - 1])
def test_a_paused_training_ends_bit_equal_to_an_undisturbed_one(tmp_path: Path, step: int) -> None:
    """With dropout, noise from three generators, Adam and a scheduler; in the middle and at the end of epochs."""
    whole = Run(tmp_path / "whole")(dropout=0.3, noise=True)
    run = Run(tmp_path / "cut")
    paused = run.paused_after(step, dropout=0.3, noise=True)
    end = run(dropout=0.3, noise=True)
    assert isinstance(whole, Finished)
    assert isinstance(end, Finished)
    assert (paused.reason, paused.progress.step) == (PauseReason.REQUESTED, step)
    assert end.value == whole.value
    assert same(parameters(end.checkpoint), parameters(whole.checkpoint))


def test_code_after_the_batches_of_an_epoch_runs_once_whatever_is_cut(tmp_path: Path) -> None:
    """After a pause at the end of an epoch, the next fragment makes the scheduler's step and the log entry."""
    run = Run(tmp_path)
    run.paused_after(BATCHES)
    run.paused_after(2 * BATCHES)
    end = run()
    assert [row["epoch"] for row in end.value["history"]] == [0, 1, 2]
    assert [row["lr"] for row in end.value["history"]] == pytest.approx([0.014, 0.0098, 0.00686])


def test_a_finished_training_counts_every_sample_once_an_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (2, 9, 17):
        run.paused_after(step)
    progress = run().progress
    assert (progress.samples, progress.samples_total) == (3 * SAMPLES, 3 * SAMPLES)
    assert (progress.samples_lost, progress.duplicate_samples) == (0, 0)


def test_what_the_ledger_counts_is_what_the_user_trained_on(tmp_path: Path) -> None:
    """A batch that the loop skips is lost, and the audit reports it."""

    def skip_one(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        for number, (x, y) in enumerate(loop(session, 1)):
            if number != 2:
                session.step(cross_entropy(model(x), y))
        return session.audit

    assert run_local(skip_one, directory=tmp_path).samples_lost == 8


def test_a_finished_training_started_again_returns_the_same_and_does_no_step(tmp_path: Path) -> None:
    first, second = Run(tmp_path)(), Run(tmp_path)()
    assert second.value == first.value
    assert second.progress.resumed_from == first.progress.step == second.progress.step


def test_a_fragment_that_is_paused_at_once_does_not_write_its_state_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = run.paused_after(5)

    def at_once(session: Any) -> Any:
        run.mailbox.pause_requested.set()
        return classify(session)

    after = run(at_once)
    assert isinstance(after, Paused)
    assert after.checkpoint == before.checkpoint
    assert list(tmp_path.glob("net/step-*")) == [before.checkpoint]


def test_what_is_done_after_the_loop_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    """Even if the last step was saved before."""

    def log_at_the_end(session: Any) -> None:
        classify(session)
        session.log(after=1.0)

    Run(tmp_path)()
    checkpoint = Run(tmp_path)(log_at_the_end).checkpoint
    assert checkpoint is not None
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    assert state["books"]["metrics"]["history"][-1]["after"] == 1.0


def test_a_plain_loop_takes_the_same_steps(tmp_path: Path) -> None:
    """On one process the session adds nothing to the arithmetic."""

    def train(session: Any) -> None:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 8, shuffle=False)
        for _ in session.epochs(1):
            for x, y in data:
                session.step(cross_entropy(model(x), y))

    end = Run(tmp_path)(train)
    torch.manual_seed(0)
    data, model = Data(), net()
    model.load_state_dict(initial_parameters(tmp_path / "initial"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for begin in range(0, SAMPLES, 8):
        cross_entropy(model(data.x[begin : begin + 8]), data.y[begin : begin + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(parameters(end.checkpoint), model.state_dict())


def initial_parameters(root: Path) -> dict[str, torch.Tensor]:
    def train(session: Any) -> None:
        session.prepare(net(), torch.optim.SGD, lr=0.1)

    return parameters(Run(root)(train).checkpoint)


def test_an_except_exception_of_the_user_does_not_stop_a_pause(tmp_path: Path) -> None:
    run = Run(tmp_path)

    swallowed = []

    def careless(session: Any) -> None:
        try:
            run.mailbox.pause_requested.set()
            classify(session)
        except Exception as error:  # noqa: BLE001 - user code under test
            swallowed.append(error)

    assert isinstance(run(careless), Paused)
    assert not swallowed


def test_not_even_a_bare_except_turns_a_pause_into_an_end(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def stubborn(session: Any) -> str:
        run.mailbox.pause_requested.set()
        try:
            classify(session)
        except BaseException:  # noqa: BLE001 - user code under test
            return "swallowed"
        return "done"

    assert isinstance(run(stubborn), Paused)


def test_an_error_of_the_user_goes_through_unchanged(tmp_path: Path) -> None:
    problem = KeyError("from user code")

    def fail(session: Any) -> None:
        raise problem

    with pytest.raises(KeyError) as caught:
        Run(tmp_path)(fail)
    assert caught.value is problem


def test_a_runtime_error_on_one_process_is_never_a_lost_peer(tmp_path: Path) -> None:
    def fail(session: Any) -> None:
        raise RuntimeError("Connection closed by peer: of a database of the user's")

    with pytest.raises(RuntimeError, match="database"):
        Run(tmp_path)(fail)


# ── reports ───────────────────────────────────────────────────────────────────────────────────────


def test_reports_are_throttled_between_start_and_end(tmp_path: Path) -> None:
    """Steps of 0.2 s: the start, every third step, the final checkpoint."""
    run = Run(tmp_path)
    run(ticking(run, 0.2))
    assert [report.step for report in run.reports] == [0, 3, 6, 9, 12, 15, 18, 21, 21]


def test_reports_tell_the_rate_without_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run(ticking(run, 0.5), samples=48)
    assert run.reports[-1].rate == pytest.approx(8 / 0.5)
    assert run.reports[0].rate is None


def test_progress_goes_into_json(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run()
    assert json.loads(json.dumps(asdict(run.reports[-1])))["step"] == 3 * BATCHES


def test_a_function_without_a_session_is_refused_when_it_is_tried_alone() -> None:
    with pytest.raises(InvalidApp, match="has no parameter for the session"):
        run_local(lambda: 3)


@pytest.mark.parametrize(("leave", "code"), [("return", 0), ("raise", 1), ("exit", 3), ("exit with text", 1)])
def test_a_forked_process_that_leaves_the_function_ends_and_is_no_member(leave: str, code: int, tmp_path: Path) -> None:
    def train(session: TrainingSession) -> tuple[int, int]:
        model = torch.nn.Linear(1, 1)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = session.loader([torch.ones(1)] * 4, batch_size=2)
        for _ in session.epochs(2):
            for batch in batches:
                session.step(model(batch).mean())
            if (child := os.fork()) == 0:
                if leave == "raise":
                    raise ValueError("in the fork")
                if leave != "return":
                    sys.exit(3 if leave == "exit" else "in the fork")
                return 0, 0
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return ended, session.metrics["steps"]

    assert run_local(train, directory=tmp_path) == (code, 4)
