"""Losses that depend on some of the outputs only: parameters that they do not reach have no gradient, as alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.extensions.fusion.sweep_trainings import alone, data, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RATES = (0.02, 0.05, 0.1)


class Net(nn.Module):
    """A network with a second head, whose last layer can be called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 8)
        self.last = nn.Linear(8, 4)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, *, last: bool = False) -> Any:
        return self.last(x) if last else (torch.tanh(self.first(x)), self.head(x))


def uses_the_head(model: Any, x: torch.Tensor, y: torch.Tensor, kind: int) -> torch.Tensor:
    hidden, head = model(x)
    loss = cross_entropy(model(hidden, last=True), y)
    return loss + cross_entropy(head, y) if kind else loss


def detaches(model: Any, x: torch.Tensor, y: torch.Tensor, kind: int) -> torch.Tensor:
    hidden, _ = model(x)
    return cross_entropy(model(hidden if kind else hidden.detach(), last=True), y)


def uses_one_output(model: Any, x: torch.Tensor, y: torch.Tensor, kind: int) -> torch.Tensor:
    """Use the output of the second call, or only outputs of the first one, which stay unused by the others."""
    hidden, head = model(x)
    out = model(hidden, last=True)
    return (cross_entropy(out, y), cross_entropy(head, y), hidden.square().mean())[kind]


def uses_parameters(model: Any, x: torch.Tensor, y: torch.Tensor, kind: int) -> torch.Tensor:
    """Use the parameters themselves instead of an output."""
    _, head = model(x)
    return cross_entropy(head, y) if kind else model.first.weight.square().sum()


class WithLoss(nn.Linear):
    """A network that returns its loss, as those of transformers do."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(super().forward(x), y)


def scales_its_loss(session: Any, *, lr: float) -> Any:
    """Change the loss that the model has returned in place, as Hugging Face's Trainer does."""
    net = WithLoss(24, 4).double()
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    batches = session.loader(data(), batch_size=16)
    for _ in session.epochs(1):
        for x, y in batches:
            loss = model(x, y)
            loss *= 3
            session.step(loss)
    return {"model": {name: parameter.clone() for name, parameter in model.state_dict().items()}}


def test_a_loss_can_be_changed_in_place(tmp_path: Path) -> None:
    outcome = together(tmp_path / "array", [{"lr": lr} for lr in RATES], scales_its_loss)
    assert outcome.engine.fused_steps == 4
    for number, lr in enumerate(RATES):
        value = alone(tmp_path / "alone", str(number), {"lr": lr}, scales_its_loss)
        assert distance(outcome.value(str(number)), value) < 1e-10


def train(
    session: Any, *, lr: float, optimizer: str, loss: Callable[..., torch.Tensor], turns: bool, clip: bool
) -> Any:
    net = Net().double()
    model, steps = session.prepare(net, getattr(torch.optim, optimizer)(net.parameters(), lr=lr, weight_decay=0.1))
    batches = session.loader(data(), batch_size=16)
    losses: list[float] = []
    for _ in session.epochs(2):
        for x, y in batches:
            value = loss(model, x, y, (RATES.index(lr) + len(losses) * turns) % 3)
            losses.append(value.item())
            if clip:
                session.backward(value)
                nn.utils.clip_grad_norm_(model.parameters(), lr)
            session.step(*[] if clip else [value])
    return {
        "losses": losses,
        "model": {name: parameter.clone() for name, parameter in model.state_dict().items()},
        "optimizer": steps.state_dict(),
    }


@pytest.mark.parametrize("loss", [uses_the_head, detaches, uses_one_output, uses_parameters])
@pytest.mark.parametrize(("optimizer", "turns", "clip"), [("AdamW", False, False), ("SGD", True, True)])
def test_parameters_that_the_loss_of_a_training_does_not_reach_are_left_alone(
    tmp_path: Path, loss: Callable[..., torch.Tensor], optimizer: str, turns: bool, clip: bool
) -> None:
    points = [{"lr": lr, "optimizer": optimizer, "loss": loss, "turns": turns, "clip": clip} for lr in RATES]
    outcome = together(tmp_path / "array", points, train)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, train)
        assert distance(outcome.value(str(number)), value) < 1e-10
