"""What user code may do with a session, and what raises an error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from training_crew import SAMPLES, Data, net
from training_runs import Run, loop

from freetrain_parsl.errors import CheckpointError, UsageError
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import Paused, run_local

if TYPE_CHECKING:
    from pathlib import Path


def other_extras(session: Any) -> None:
    session.prepare(net(), torch.optim.Adam)


# ── wrong use ──────────────────────────────────────────────────────────────────────────────────


def no_prepare(session: Any) -> None:
    session.epochs(1)


def two_loaders(session: Any) -> None:
    other_extras(session)
    session.loader(Data(), 8)
    session.loader(Data(), 8)


def step_without_batch(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    session.step(model(torch.zeros(1, 6)).sum())


def step_outside_the_loader(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    session.loader(Data(), 8)
    for _ in session.epochs(1):
        session.step(model(torch.zeros(1, 6)).sum())


def step_without_loss(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    for _ in loop(session, 1):
        session.step()


def backward_twice(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    for x, y in loop(session, 1):
        session.backward(cross_entropy(model(x), y))
        session.backward(cross_entropy(model(x), y))


def several_steps_on_micro_batches(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8, micro_batch=8)
    for _ in session.epochs(1):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            session.step(cross_entropy(model(x), y))


def unknown_optimizer(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loop(session, 1):
        session.step(cross_entropy(model(x), y), optimizer=other)


def batch_loss_early(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    session.batch_loss  # noqa: B018 - the access is the mistake under test


def no_micro_batch(session: Any) -> None:
    other_extras(session)
    session.loader(Data(), 8, micro_batch=0)


def deterministic_and_scaled(session: Any) -> None:
    other_extras(session)
    session.loader(Data(), 8, deterministic=True, options=LoaderOptions(scaled=True))


def shuffled_stream(session: Any) -> None:
    other_extras(session)
    session.loader(session.stream(range(9), samples=9), 8)


def empty_stream(session: Any) -> None:
    session.stream(range(9), samples=0)


def not_a_stream(session: Any) -> None:
    session.stream(9, samples=9)


def short_stream(session: Any) -> None:
    other_extras(session)
    data = session.loader(session.stream(range(9), samples=10), 5, shuffle=False)
    for _ in session.epochs(1):
        list(data)


def loader_outside(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    next(iter(session.loader(Data(), 8)))


def loader_twice(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for _ in range(2):
            for x, y in data:
                session.step(cross_entropy(model(x), y))


def loader_in_the_loop(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    for _ in session.epochs(1):
        for x, y in session.loader(Data(), 8):
            session.step(cross_entropy(model(x), y))


def prepare_in_the_loop(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    for _ in session.epochs(1):
        session.prepare(net(), torch.optim.SGD, lr=0.1)


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


def loss_of_each_sample(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for x, y in data:
            session.step(cross_entropy(model(x), y, reduction="none"))


def loss_as_number(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for _ in data:
            session.step(0.5)


def endless_epochs(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    session.loader(Data(), 8)
    session.epochs(math.inf)


def test_a_loss_may_have_one_dimension_of_length_one() -> None:
    def train(session: Any) -> int:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        for x, y in loop(session, 1):
            session.step(cross_entropy(model(x), y).reshape(1))
        return session.audit.samples_seen

    assert run_local(train) == SAMPLES


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (loss_of_each_sample, r"the mean loss, a tensor with one element; got one of shape \(8,\)"),
        (loss_as_number, "the mean loss, a tensor with one element; got float"),
        (endless_epochs, "the number of epochs must be a whole number, got inf"),
        (no_prepare, "call session.prepare"),
        (two_loaders, "one loader"),
        (step_without_batch, r"without a loader, .* session.loader\(range\(1000\), batch_size=8\)"),
        (step_outside_the_loader, "without a batch of session.loader"),
        (step_without_loss, "needs a loss"),
        (backward_twice, "once with each step"),
        (several_steps_on_micro_batches, "several steps in a batch"),
        (unknown_optimizer, "was not given to session.prepare"),
        (batch_loss_early, "made no step yet"),
        (no_micro_batch, "micro_batch must be at least 1, got 0"),
        (deterministic_and_scaled, "no scaled=True"),
        (shuffled_stream, "a stream has one order"),
        (empty_stream, "at least 1, got 0"),
        (not_a_stream, "iterate over, got int"),
        (short_stream, "range ended after 9 samples, but samples=10"),
        (loader_outside, r'inside `for epoch .* end both loops when `session.metrics\["steps"\] >= N`'),
        (loader_twice, "once per epoch"),
        (loader_in_the_loop, "call it before the loop: `data = session.loader"),
        (prepare_in_the_loop, "call session.prepare before the loop"),
        (options_for_an_instance, "give lr to the optimizer"),
        (stateless, "object has no state_dict"),
        (not_a_model, "torch.nn.Module first, got Data"),
        (log_early, "inside or after"),
        (log_a_list, "numbers and strings, got list"),
    ],
)
def test_wrong_use_is_refused_in_one_line(tmp_path: Path, function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_local(function, directory=tmp_path)
    assert "\n" not in str(caught.value)


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"function": Run}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WithFunction(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return Run

    def set_extra_state(self, state: Any) -> None: ...


def test_a_state_that_could_not_be_read_back_is_refused_before_training(tmp_path: Path) -> None:
    def train(session: Any) -> None:
        session.prepare(net(), torch.optim.SGD, Unsavable(), lr=0.1)

    with pytest.raises(CheckpointError, match="the state of Unsavable cannot be saved"):
        run_local(train, directory=tmp_path)

    def train_model(session: Any) -> None:
        session.prepare(WithFunction(2, 2), torch.optim.SGD, lr=0.1)

    with pytest.raises(CheckpointError, match="the state of the model cannot be saved"):
        run_local(train_model, directory=tmp_path)


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

    assert run_local(train, directory=tmp_path) == pytest.approx(1.0, rel=1e-3)


def test_an_epoch_left_early_is_no_loss(tmp_path: Path) -> None:
    """A step limit in user code: such epochs have a row in the history, but are not audited."""

    def train(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 8)
        for _ in session.epochs(2):
            for number, (x, y) in enumerate(data):
                session.step(cross_entropy(model(x), y))
                if number == 2:
                    break
        return (
            session.audit.samples_lost,
            [row["epoch"] for row in session.metrics["history"]],
            session.metrics["steps"],
        )

    assert run_local(train, directory=tmp_path) == (0, [0, 1], 6)


def test_a_look_at_the_first_batch_does_not_lose_it(tmp_path: Path) -> None:
    def train(session: Any) -> Any:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(Data(), 8)
        for _ in session.epochs(1):
            next(iter(data))
            for x, y in data:
                session.step(cross_entropy(model(x), y))
        return session.audit

    audit = run_local(train, directory=tmp_path)
    assert (audit.samples_seen, audit.samples_lost, audit.duplicate_samples) == (SAMPLES, 0, 0)


def test_random_numbers_before_the_loop_are_the_same_in_all_fragments(tmp_path: Path) -> None:
    """So a random split of the data is the same in all fragments."""
    drawn = []
    run = Run(tmp_path)

    def train(session: Any) -> None:
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        drawn.append(torch.rand(1).item())
        for x, y in loop(session, 1):
            session.step(cross_entropy(model(x), y))
            run.mailbox.pause_requested.set()

    assert isinstance(run(train), Paused)
    run(train)
    assert drawn[0] == drawn[1]


def test_the_session_has_a_directory_for_the_users_own_files(tmp_path: Path) -> None:
    def train(session: Any) -> Path:
        (session.directory / "note").write_text("mine")
        return session.directory

    assert (run_local(train, directory=tmp_path) / "note").read_text() == "mine"


# ── the user's own objects ─────────────────────────────────────────────────────────────────────


def looks_at_its_scheduler(session: Any) -> dict[str, Any]:
    import pickle

    from torch.optim.lr_scheduler import StepLR

    model = net()
    plain = StepLR(torch.optim.SGD(net().parameters(), lr=1.0), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, _, scheduler = session.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    data = session.loader(Data(), 16, micro_batch=4)
    steps = 0
    for _ in session.epochs(1):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            scheduler.step()
            plain.optimizer.step()
            plain.step()
            steps += 1
    again = pickle.loads(pickle.dumps(scheduler))
    return {
        "is its class": type(scheduler) is StepLR,
        "keeps its state": scheduler.state_dict().keys() == plain.state_dict().keys(),
        "is pickled": again.last_epoch == scheduler.last_epoch,
        "stepped": scheduler.last_epoch,
        "the other stepped": plain.last_epoch,
        "pieces": steps,
    }


def test_a_scheduler_keeps_its_class_and_steps_once_a_batch() -> None:
    """In pieces of a batch it does nothing; one that the session does not know steps at each call."""
    from torch.optim.lr_scheduler import LRScheduler, StepLR

    before = LRScheduler.step
    seen = run_local(looks_at_its_scheduler)
    pieces, batches = -(-SAMPLES // 4), -(-SAMPLES // 16)
    assert seen == {
        "is its class": True,
        "keeps its state": True,
        "is pickled": True,
        "stepped": batches,
        "the other stepped": pieces,
        "pieces": pieces,
    }
    assert LRScheduler.step is before
    assert "step" not in vars(StepLR)


def test_a_training_app_runs_alone_as_its_function_does() -> None:
    from freetrain_parsl import training_app

    def returns(session: Any, value: int) -> int:
        return value

    assert run_local(training_app(returns), value=3) == run_local(returns, 3) == 3
