"""Models whose parameters or buffers are views of one another: they are not fused, and stay views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from freetrain_parsl.extensions.fusion.forward.shared_base import overlapping
from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from pathlib import Path


class Tied(nn.Module):
    """A frozen layer, and a decoder that sees the weight of the encoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encode, self.frozen = nn.Linear(6, 4, bias=False), nn.Linear(4, 4).requires_grad_(False)
        self.double()
        if kind == "buffer":
            self.register_buffer("decoder", self.encode.weight.detach().t())
        else:
            self.decoder = nn.Parameter(self.encode.weight.data, requires_grad=False)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.decoder if self.kind == "buffer" else self.decoder.t()
        return functional.linear(self.frozen(self.encode(x)), weight)


def restore(session: Any, *, kind: str, lr: float) -> dict[str, Any]:
    torch.manual_seed(2)
    model = Tied(kind)
    model, _ = session.prepare(model, torch.optim.SGD([model.encode.weight], lr=lr))
    losses, data = [], session.loader(TensorDataset(torch.rand(16, 6, dtype=torch.float64)), 4)
    for _ in session.epochs(3):
        for (x,) in data:
            loss = functional.mse_loss(model(x), x)
            session.step(loss)
            losses.append(loss.item())
    return {"losses": losses, "weight": model.encode.weight.detach()}


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_views_follow_what_they_are_views_of(tmp_path: Path, kind: str) -> None:
    """Separate memory for each made the decoder stay as it was: other losses, and no error."""
    points = [{"kind": kind, "lr": 0.2 * (number + 1)} for number in range(3)]
    outcome = together(tmp_path / "array", points, restore)
    for number, point in enumerate(points):
        assert distance(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point, restore)) == 0.0
    assert outcome.engine.fused_steps == 0


def test_tensors_beside_each_other_in_one_memory_do_not_overlap() -> None:
    """As the weights of an LSTM on a GPU."""
    memory = torch.zeros(12)
    first, second, third = memory[:4], memory[4:8], memory[6:].view(2, 3)
    assert overlapping([first, second, first]) == set()
    assert overlapping([first, second, third]) == {id(second), id(third)}
    assert overlapping([memory, first, third]) == {id(memory), id(first), id(third)}
