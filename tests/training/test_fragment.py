"""Fragments in one process: pauses, resumes, ends and refusals."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from training_crew import SAMPLES, Data, classify, net

from freetrain_parsl.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, UsageError
from freetrain_parsl.training.fragment import (
    Finished,
    Membership,
    Notice,
    Paused,
    PauseReason,
    Progress,
    SessionOptions,
    run_alone,
    run_fragment,
)

BATCHES = 7  # of 8 in 53 samples


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Fragments of one training in this process."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.clock = Clock()
        self.options = SessionOptions("net", root, **options)
        self.reports: list[Progress] = []
        self.notice = Notice(self.clock)

    def __call__(self, function: Any = classify, **kwargs: Any) -> Finished | Paused:
        self.notice = Notice(self.clock)
        return run_fragment(
            function,
            (),
            kwargs,
            options=self.options,
            membership=Membership("net"),
            store=None,
            notice=self.notice,
            report=self.reports.append,
            clock=self.clock,
        )

    def paused_after(self, step: int, **kwargs: Any) -> Paused:
        """Run until that step, then ask for a pause."""
        end = self(pausing(self, step), **kwargs)
        assert isinstance(end, Paused)
        return end


def pausing(run: Run, step: int) -> Any:
    """Return `classify`, with a notice after a number of steps."""

    def function(session: Any, **kwargs: Any) -> Any:
        steps = session.step

        def step_and_notice(loss: torch.Tensor) -> None:
            steps(loss)
            if session.metrics["steps"] == step:
                run.notice.pause_requested.set()

        session.step = step_and_notice
        return classify(session, **kwargs)

    return function


def parameters(checkpoint: Path | None) -> dict[str, torch.Tensor]:
    assert checkpoint is not None
    return torch.load(checkpoint / "state.pt", weights_only=True)["objects"]["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("step", [1, 5, BATCHES, BATCHES + 1, 2 * BATCHES, 3 * BATCHES - 1])
def test_a_paused_training_ends_bit_equal_to_an_undisturbed_one(tmp_path: Path, step: int) -> None:
    """With dropout, noise from three generators, Adam and a scheduler, in the middle and at the end of epochs."""
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
    """A pause at the very end of an epoch leaves the scheduler's step and the log to the next fragment."""
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
    """A batch that the loop skips is lost, and the audit says so."""

    def skip_one(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        for number, (x, y) in enumerate(loop(session, 1)):
            if number != 2:
                session.step(cross_entropy(model(x), y))
        return session.audit

    assert run_alone(skip_one, directory=tmp_path).samples_lost == 8


def loop(session: Any, epochs: int, batch_size: int = 8) -> Any:
    """Iterate over the batches of all epochs."""
    data = session.loader(Data(), batch_size)
    for _ in session.epochs(epochs):
        yield from data


def test_a_finished_training_started_again_returns_the_same_and_does_no_step(tmp_path: Path) -> None:
    first, second = Run(tmp_path)(), Run(tmp_path)()
    assert second.value == first.value
    assert second.progress.resumed_from == first.progress.step == second.progress.step


def test_a_plain_loop_takes_the_same_steps(tmp_path: Path) -> None:
    """On one process the session adds nothing to the arithmetic."""

    def train(session: Any) -> None:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        for _ in session.epochs(1):
            for x, y in session.loader(Data(), 8, shuffle=False):
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

    def careless(session: Any) -> str:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        for x, y in loop(session, 3):
            try:
                session.step(cross_entropy(model(x), y))
                run.notice.pause_requested.set()
            except Exception:
                return "swallowed"
        return "done"

    assert isinstance(run(careless), Paused)


def test_not_even_a_bare_except_turns_a_pause_into_an_end(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def stubborn(session: Any) -> str:
        run.notice.pause_requested.set()
        try:
            classify(session)
        except BaseException:
            return "swallowed"
        return "done"

    assert isinstance(run(stubborn), Paused)


def test_an_error_of_the_user_goes_through_unchanged(tmp_path: Path) -> None:
    problem = KeyError("the user's own")

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


# ── when to save ───────────────────────────────────────────────────────────────────────────────


def ticking(run: Run, seconds: float) -> Any:
    """Return `classify`, with steps that take that long on the run's clock."""

    def function(session: Any, **kwargs: Any) -> Any:
        steps = session.step

        def slow_step(loss: torch.Tensor) -> None:
            steps(loss)
            run.clock.now += seconds

        session.step = slow_step
        return classify(session, **kwargs)

    return function


def test_the_closing_time_drives_the_last_save(tmp_path: Path) -> None:
    """It stops with a step, the margin and a write still to go: not later, and not a step earlier."""
    run = Run(tmp_path, save_margin=timedelta(seconds=2))

    def function(session: Any) -> Any:
        run.notice.close_after(timedelta(seconds=10.5))
        return ticking(run, 1.0)(session)

    end = run(function)
    assert isinstance(end, Paused)
    assert end.reason is PauseReason.CLOSING
    assert end.progress.step == 8  # 2.5 s left; a ninth step would leave 1.5 s


def test_a_closing_time_that_moves_away_lets_the_training_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def function(session: Any) -> Any:
        run.notice.close_after(timedelta(seconds=1))
        run.notice.close_after(None)
        return ticking(run, 1.0)(session)

    assert isinstance(run(function), Finished)


def test_periodic_checkpoints_keep_their_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=5))
    run(ticking(run, 1.0))
    saved = [report.checkpoint_step for report in run.reports]
    assert sorted({step for step in saved if step is not None}) == [5, 10, 15, 20, 21]


def test_two_checkpoints_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=5))
    run(ticking(run, 1.0))
    kept = sorted(path.name for path in (tmp_path / "net").glob("step-*"))
    assert kept == ["step-0000000020", "step-0000000021"]


def test_a_periodic_save_that_fails_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before is still good; the disk may have room again next time."""
    run = Run(tmp_path, checkpoint_interval=timedelta(seconds=5))
    fail_once = iter([True])
    import freetrain_parsl.training.checkpoint as module

    save = torch.save

    def full_disk(*args: Any) -> None:
        if next(fail_once, False):
            raise OSError(28, "No space left on device")
        save(*args)

    monkeypatch.setattr(module.torch, "save", full_disk)
    assert isinstance(run(ticking(run, 1.0)), Finished)
    assert "No space left on device" in caplog.text
    assert min(report.checkpoint_step for report in run.reports if report.checkpoint_step) == 10


def test_a_last_save_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import freetrain_parsl.training.checkpoint as module

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.torch, "save", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        Run(tmp_path)()


# ── damaged and foreign checkpoints ────────────────────────────────────────────────────────────


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


def test_if_all_checkpoints_are_damaged_nothing_starts_afresh(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.paused_after(5)
    run.paused_after(9)
    for checkpoint in (tmp_path / "net").glob("step-*"):
        damage(checkpoint, "flipped")
    with pytest.raises(DamagedCheckpoint, match="none of 2 checkpoints is intact"):
        run()


def other_net(session: Any) -> None:
    session.prepare(torch.nn.Linear(2, 2), torch.optim.Adam)


def other_extras(session: Any) -> None:
    session.prepare(net(), torch.optim.Adam)


@pytest.mark.parametrize(
    ("function", "kwargs", "difference"),
    [
        (classify, {"batch_size": 4}, "batch_size 8, now it is 4"),
        (classify, {"samples": 54}, "length 53, now it is 54"),
        (other_net, {}, "model, optimizer, StepLR 1, but session.prepare got model, optimizer"),
        (other_extras, {}, "model, optimizer, StepLR 1"),
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


# ── reports ────────────────────────────────────────────────────────────────────────────────────


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
    import json
    from dataclasses import asdict

    run = Run(tmp_path)
    run()
    assert json.loads(json.dumps(asdict(run.reports[-1])))["step"] == 3 * BATCHES


# ── wrong use ──────────────────────────────────────────────────────────────────────────────────


def no_prepare(session: Any) -> None:
    session.epochs(1)


def prepare_twice(session: Any) -> None:
    other_extras(session)
    other_extras(session)


def two_loaders(session: Any) -> None:
    session.loader(Data(), 8)
    session.loader(Data(), 8)


def step_without_batch(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    session.step(model(torch.zeros(1, 6)).sum())


def step_without_loss(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    for _ in loop(session, 1):
        session.step()


def step_twice(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    for x, y in loop(session, 1):
        session.step(cross_entropy(model(x), y))
        session.step(cross_entropy(model(x), y))


def loader_outside(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    next(iter(session.loader(Data(), 8)))


def loader_twice(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        list(data)
        list(data)


def options_for_an_instance(session: Any) -> None:
    model = net()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lr=0.1)


def stateless(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, object(), lr=0.1)


def not_a_model(session: Any) -> None:
    session.prepare(Data(), torch.optim.SGD)


def log_early(session: Any) -> None:
    session.log(width=3)


def log_a_list(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    for _ in loop(session, 1):
        session.log(values=[1, 2])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_prepare, "call session.prepare"),
        (prepare_twice, "call session.prepare once"),
        (two_loaders, "one loader"),
        (step_without_batch, "once with each batch"),
        (step_without_loss, "needs a loss"),
        (step_twice, "once with each batch"),
        (loader_outside, "inside `for epoch"),
        (loader_twice, "once an epoch"),
        (options_for_an_instance, "give lr to the optimizer"),
        (stateless, "object has no state_dict"),
        (not_a_model, "torch.nn.Module first, got Data"),
        (log_early, "inside or after"),
        (log_a_list, "numbers and strings, got list"),
    ],
)
def test_wrong_use_is_refused_in_one_line(tmp_path: Path, function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_alone(function, directory=tmp_path)
    assert "\n" not in str(caught.value)


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"function": Run}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_could_not_be_read_back_is_refused_before_training(tmp_path: Path) -> None:
    def train(session: Any) -> None:
        session.prepare(net(), torch.optim.SGD, Unsavable(), lr=0.1)

    with pytest.raises(CheckpointError, match="the state of Unsavable cannot be kept"):
        run_alone(train, directory=tmp_path)


# ── user habits ────────────────────────────────────────────────────────────────────────────────


def test_gradients_can_be_clipped_between_backward_and_step(tmp_path: Path) -> None:
    def train(session: Any) -> float:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.0)
        for x, y in loop(session, 1):
            session.backward(100 * cross_entropy(model(x), y))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            session.step()
        return float(norm)

    assert run_alone(train, directory=tmp_path) == pytest.approx(1.0, rel=1e-3)


def test_an_epoch_left_early_is_no_loss(tmp_path: Path) -> None:
    """The user's own limit on steps: such epochs have their row, and are not audited."""

    def train(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 8)
        for _ in session.epochs(2):
            for number, (x, y) in enumerate(data):
                session.step(cross_entropy(model(x), y))
                if number == 2:
                    break
        return session.audit.samples_lost, [row["epoch"] for row in session.metrics["history"]], session.metrics["steps"]

    assert run_alone(train, directory=tmp_path) == (0, [0, 1], 6)


def test_a_look_at_the_first_batch_does_not_lose_it(tmp_path: Path) -> None:
    def train(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 8)
        for _ in session.epochs(1):
            next(iter(data))
            for x, y in data:
                session.step(cross_entropy(model(x), y))
        return session.audit

    audit = run_alone(train, directory=tmp_path)
    assert (audit.samples_seen, audit.samples_lost, audit.duplicate_samples) == (SAMPLES, 0, 0)


def test_random_numbers_before_the_loop_are_the_same_in_all_fragments(tmp_path: Path) -> None:
    """So a random split of the data is one split, not one for each fragment."""
    drawn = []
    run = Run(tmp_path)

    def train(session: Any) -> None:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        drawn.append(torch.rand(1).item())
        for x, y in loop(session, 1):
            session.step(cross_entropy(model(x), y))
            run.notice.pause_requested.set()

    assert isinstance(run(train), Paused)
    run(train)
    assert drawn[0] == drawn[1]


def test_the_session_has_a_directory_for_the_users_own_files(tmp_path: Path) -> None:
    def train(session: Any) -> Path:
        (session.directory / "note").write_text("mine")
        return session.directory

    assert (run_alone(train, directory=tmp_path) / "note").read_text() == "mine"
