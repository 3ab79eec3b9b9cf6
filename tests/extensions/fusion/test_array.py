"""What an array stacks: weights with their channels last in memory, and tied ones."""

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


def channels_last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def convolutions(dropout: float) -> nn.Module:
    net = nn.Sequential(
        nn.Unflatten(1, (2, 3, 4)),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(36, 4),
    )
    return net.double()


class Tied(nn.Module):
    """A network whose weights, modules and buffers have several names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = self.first
        self.last, self.head = nn.Linear(24, 4), nn.Linear(24, 4)
        self.head.weight = self.last.weight
        self.register_buffer("calls", torch.zeros(1))
        self.part = nn.Module()
        self.part.register_buffer("number", self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(hidden) + self.head(x) * self.part.number / 10


def train(
    session: Any,
    *,
    lr: float,
    make: Callable[[], nn.Module],
    optimizer: str = "SGD",
    change: Callable[..., Any] | None = None,
) -> Any:
    """Train for three epochs; `change` is called with the model at the start of the second one."""
    net = make()
    model, steps = session.prepare(net, getattr(torch.optim, optimizer)(net.parameters(), lr=lr / 10))
    batches = session.loader(data(), batch_size=16)
    losses: list[float] = []
    for epoch in session.epochs(3):
        if change is not None and epoch == 1:
            change(model)
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            session.step(loss)
            losses.append(loss.item())
    states = [value for state in steps.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return {
        "losses": losses,
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "layouts": [list(tensor.stride()) for tensor in (*model.parameters(), *states)],
    }


def fused_steps_as_alone(root: Path, **point: Any) -> int:
    points = [{"lr": lr, **point} for lr in RATES]
    outcome = together(root / "array", points, train)
    for number, each in enumerate(points):
        value = alone(root / "alone", str(number), each, train)
        assert distance(outcome.value(str(number)), value) < 1e-9
    return outcome.engine.fused_steps


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
def test_weights_keep_their_channels_last(tmp_path: Path, optimizer: str) -> None:
    def make() -> nn.Module:
        return channels_last(convolutions(0.0))

    assert fused_steps_as_alone(tmp_path, make=make, optimizer=optimizer) == 12


def test_masks_of_dropout_are_in_the_order_of_the_memory(tmp_path: Path) -> None:
    """Convolutions with groups have their channels first, so the training jobs go on one by one."""
    fused_steps_as_alone(tmp_path, make=lambda: channels_last(convolutions(0.3)))


def test_weights_whose_layout_changes_are_compared_again(tmp_path: Path) -> None:
    fused_steps_as_alone(tmp_path, make=lambda: convolutions(0.3), change=channels_last)


def test_tied_weights_and_buffers_are_fused(tmp_path: Path) -> None:
    assert fused_steps_as_alone(tmp_path, make=lambda: Tied().double()) == 12
