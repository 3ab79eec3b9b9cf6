"""Gradients that would be lost, or those of one process only, end a job with a mend; harmless code does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from losses import Net, points
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from training_runs import Run

from freetrain_parsl.errors import CheckpointMismatch, UsageError
from freetrain_parsl.training.fragment import Finished, Paused, run_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def batches(session: Any, *objects: Any, epochs: int = 1, **loader: Any) -> Iterator[Any]:
    """Prepare objects, and iterate over batches."""
    session.prepare(*objects)
    data = session.loader(points(), loader.pop("batch_size", 8), **loader)
    for _ in session.epochs(epochs):
        yield from data


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def lbfgs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=2)


def refused(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_local(function)
    assert "\n" not in str(caught.value)


# ── gradients without a step ──────────────────────────────────────────────────────────────────────


def test_two_backward_passes_and_one_step_are_refused() -> None:
    def train(session: Any) -> None:
        net = Net()
        for number, (x, y) in enumerate(batches(session, net, sgd(net))):
            session.backward(cross_entropy(net(x), y) / 2)
            if number % 2:
                session.step()

    refused(train, r"session.backward\(\) was called for a batch, and session.step\(\) was not.*micro_batch=")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_may_be_skipped_after_its_backward_pass(set_to_none: bool) -> None:
    def train(session: Any) -> int:
        net = Net()
        optimizer = sgd(net)
        for number, (x, y) in enumerate(batches(session, net, optimizer)):
            session.backward(cross_entropy(net(x), y))
            if number % 2:
                session.step()
            else:
                optimizer.zero_grad(set_to_none=set_to_none)
        return int(session.metrics["steps"])

    assert run_local(train) == 3


# ── parameters that the session does not know ─────────────────────────────────────────────────────


def test_an_optimizer_that_is_not_prepared_cannot_step_on_gradients_of_the_session() -> None:
    def train(session: Any) -> None:
        net, scale = Net(), nn.Parameter(torch.ones((), dtype=torch.float64))
        other = torch.optim.SGD([scale], lr=0.1)
        for x, y in batches(session, net, sgd(net)):
            session.step(cross_entropy(net(x) * scale, y))
            other.step()
            other.zero_grad()

    refused(train, r"SGD.step\(\) was called for parameters that session.prepare does not know.*pass the SGD to")


def test_teachers_and_probes_are_no_mistakes() -> None:
    """A teacher that requires gradients without an optimizer, and a probe that is trained by itself."""

    def train(session: Any) -> int:
        net, teacher, probe = Net(), Net(), nn.Linear(3, 3).double()
        for_probe = sgd(probe)
        for x, y in batches(session, net, sgd(net)):
            out = net(x)
            session.step(cross_entropy(out, y) + mse_loss(out, teacher(x)))
            cross_entropy(probe(out.detach()), y).backward()
            for_probe.step()
            for_probe.zero_grad()
        return int(session.metrics["steps"])

    assert run_local(train) == 7


def tempered(session: Any, run: Run, pause_after: int | None = None, shape: tuple[int, ...] = ()) -> Any:
    """Train a temperature that is only in the optimizer."""
    net, scale = Net(), nn.Parameter(torch.ones(shape, dtype=torch.float64))
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
    for x, y in batches(session, net, optimizer, epochs=2):
        session.step(cross_entropy(net(x) * scale, y))
        if session.metrics["steps"] == pause_after:
            run.mailbox.pause_requested.set()
    return scale.detach().clone()


def test_parameters_of_an_optimizer_alone_are_saved_and_restored(tmp_path: Path) -> None:
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    expected = whole(tempered, run=whole)
    assert isinstance(cut(tempered, run=cut, pause_after=5), Paused)
    end = cut(tempered, run=cut)
    assert isinstance(expected, Finished)
    assert isinstance(end, Finished)
    assert end.value != 1.0
    assert torch.equal(end.value, expected.value)


def test_they_have_to_have_the_same_shape(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert isinstance(run(tempered, run=run, pause_after=5), Paused)
    with pytest.raises(CheckpointMismatch, match=r"optimizer, group 0, parameter 6 has shape \(\), now \(3,\)"):
        run(tempered, run=run, shape=(3,))


# ── closures ──────────────────────────────────────────────────────────────────────────────────────

CLOSURE = r"write `def closure\(\): return loss_function\(model\(x\), y\)`.*`session.step\(closure\)`"


def with_a_loss(session: Any) -> None:
    net = Net()
    for x, y in batches(session, net, lbfgs(net)):
        session.step(cross_entropy(net(x), y))


def by_the_optimizer(session: Any) -> None:
    by_this(session, lbfgs)


def by_sgd(session: Any) -> None:
    by_this(session, sgd)


def by_this(session: Any, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    net = Net()
    optimizer = make(net)

    for x, y in batches(session, net, optimizer):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)  # noqa: B023 - called at once
            loss.backward()
            return loss

        optimizer.step(closure)


def with_backward(session: Any) -> None:
    net = Net()
    optimizer = lbfgs(net)

    for x, y in batches(session, net, optimizer):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)  # noqa: B023 - called at once
            loss.backward()
            return loss

        session.step(closure)


def with_the_sessions_backward(session: Any) -> None:
    net = Net()

    for x, y in batches(session, net, lbfgs(net)):

        def closure() -> Any:
            loss = cross_entropy(net(x), y)  # noqa: B023 - called at once
            session.backward(loss)
            return loss

        session.step(closure)


@pytest.mark.parametrize("function", [with_a_loss, by_the_optimizer, by_sgd, with_backward, with_the_sessions_backward])
def test_other_ways_to_use_a_closure_are_refused_with_the_right_one(function: Callable[[Any], None]) -> None:
    refused(function, CLOSURE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 2}, "LBFGS cannot be combined with micro_batch or deterministic=True"),
        ({"deterministic": True}, "LBFGS cannot be combined with micro_batch or deterministic=True"),
        ({"batch_range": (4, 16)}, "LBFGS cannot be combined with batch_range"),
        ({"scaler": True}, "LBFGS cannot be combined with a GradScaler"),
        ({"two": True}, "say whose step it is with optimizer="),
    ],
)
def test_what_a_closure_cannot_be_combined_with_is_refused(options: dict[str, Any], message: str) -> None:
    def train(session: Any) -> None:
        net = Net()
        others = [torch.amp.GradScaler("cpu")] if options.pop("scaler", False) else []
        others += [sgd(Net())] if options.pop("two", False) else []
        for x, y in batches(session, net, lbfgs(net), *others, **options):
            session.step(lambda x=x, y=y: cross_entropy(net(x), y))

    refused(train, message)


def test_sums_cannot_be_called_in_a_closure() -> None:
    def train(session: Any) -> None:
        net = Net()
        for x, _ in batches(session, net, lbfgs(net)):
            session.step(lambda x=x: session.all_reduce(net(x)).pow(2).mean())

    refused(train, "session.all_reduce cannot be called in the closure")


def test_an_optimizer_that_needs_no_closure_evaluates_it_once() -> None:
    def train(session: Any, by_closure: bool) -> torch.Tensor:
        net = Net()
        for x, y in batches(session, net, sgd(net)):
            assert session.step((lambda x=x, y=y: cross_entropy(net(x), y)) if by_closure else cross_entropy(net(x), y))
        return net.last.weight.detach()

    assert torch.equal(run_local(train, by_closure=True), run_local(train, by_closure=False))


# ── sums and reductions ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{"micro_batch": 2}, {}], ids=str)
@pytest.mark.parametrize("verb", ["all_reduce", "gather"])
def test_a_part_of_a_loss_has_to_be_of_the_whole_batch(options: dict[str, Any], verb: str) -> None:
    """With micro-batches it may be read, but not be part of a loss; nor be differentiated without the session."""

    def train(session: Any) -> None:
        net = Net()
        for x, _ in batches(session, net, sgd(net), **options):
            value = getattr(session, verb)(net(x)).mean()
            assert value.item() == value.detach().item()
            if options:
                session.step(value)
            else:
                torch.autograd.grad(value, net.last.bias)

    refused(train, "cannot be part of a loss with micro_batch" if options else "the values of all processes would be")


def test_what_is_no_tensor_of_samples_is_not_gathered() -> None:
    def train(session: Any, value: Any) -> None:
        for _ in batches(session, Net(), sgd(Net())):
            session.gather(value)

    for value, message in ((3, "got int"), (torch.tensor(3), "got one without dimensions")):
        with pytest.raises(UsageError, match=message):
            run_local(train, value=value)


@pytest.mark.parametrize(
    ("given", "loader", "message"),
    [
        ({"reduction": "none"}, {}, 'reduction must be "mean", "sum" or "batch", got \'none\''),
        ({"reduction": "sum", "items": 3}, {}, "items=… says that the loss is a mean"),
        ({"reduction": "batch"}, {"micro_batch": 2}, "cannot be combined with micro_batch"),
        ({"reduction": "sum"}, {"batch_range": (4, 16)}, "cannot be combined with batch_range"),
    ],
)
def test_reductions_that_make_no_sense_are_refused(given: dict[str, Any], loader: dict[str, Any], message: str) -> None:
    def train(session: Any) -> None:
        net = Net()
        for x, _ in batches(session, net, sgd(net), **loader):
            session.step(net(x).pow(2).sum(), **given)

    refused(train, message)


def test_a_bare_sum_is_what_the_user_says() -> None:
    def train(session: Any, reduction: str) -> float:
        net = Net()
        for x, y in batches(session, net, sgd(net), batch_size=53):
            session.step(cross_entropy(net(x), y, reduction="none").sum(), reduction=reduction)
        return float(session.metrics["loss"])

    assert run_local(train, reduction="mean") == pytest.approx(53 * run_local(train, reduction="sum"))
