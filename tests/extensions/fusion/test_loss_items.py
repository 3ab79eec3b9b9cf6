"""Losses that a model computes itself, as those of transformers: a fused one is weighed by the items that count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from pathlib import Path

WORDS, LENGTH = 11, 7


class Tagger(nn.Module):
    """Computes the mean over the words that have a tag."""

    weight: torch.Tensor | None

    def __init__(self, ignored: int, weight: torch.Tensor | None, *, logs: bool, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.table, self.score, self.ignored, self.logs = nn.Embedding(WORDS, 6), nn.Linear(6, 4), ignored, logs
        self.register_buffer("weight", weight)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.score(self.table(words)).flatten(0, 1)
        options = {"weight": self.weight, "ignore_index": self.ignored}
        if self.logs:
            return {"loss": functional.nll_loss(scores.log_softmax(1), tags.flatten(), **options)}
        return {"loss": functional.cross_entropy(scores, tags.flatten(), label_smoothing=self.smoothing, **options)}


def texts(ignored: int) -> TensorDataset:
    """Each text has another number of words that count."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(WORDS, (40, LENGTH), generator=generator)
    tags = words % 3 + 1
    tags[torch.arange(LENGTH) > torch.randint(LENGTH, (40, 1), generator=generator)] = ignored
    return TensorDataset(words, tags)


def tag(
    session: Any, *, lr: float, micro_batch: int | None, ignored: int, logs: bool, weighs: bool, smoothing: float = 0.0
) -> dict[str, Any]:
    torch.manual_seed(1)
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0]) * lr if weighs else None
    model = Tagger(ignored, weight, logs=logs, smoothing=smoothing).double()
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    data = session.loader(texts(ignored), 8, micro_batch=micro_batch)
    for _ in session.epochs(3):
        for words, tags in data:
            counted = tags[tags != ignored]
            items = len(counted) if weight is None else weight[counted].sum().item()
            session.backward(model(words, tags)["loss"], **({"items": items} if smoothing else {}))
            session.step()
    return {"model": model.state_dict(), "losses": [row["loss"] for row in session.metrics["history"]]}


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize(("logs", "smoothing"), [(True, 0.0), (False, 0.0), (False, 0.2)])
@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_loss_of_the_model_is_weighed_as_alone(
    tmp_path: Path, micro_batch: int | None, ignored: int, smoothing: float, *, logs: bool, weighs: bool
) -> None:
    """Its parts were weighed by samples: another mean of the epoch, and with micro-batches another gradient."""
    options = {"micro_batch": micro_batch, "ignored": ignored, "logs": logs, "weighs": weighs, "smoothing": smoothing}
    points = [{"lr": 0.1 * (number + 1), **options} for number in range(3)]
    outcome = together(tmp_path / "array", points, tag)
    assert not outcome.engine.reason
    assert outcome.engine.fused_steps == 15
    for number, point in enumerate(points):
        expected = alone(tmp_path / "alone", str(number), point, tag)
        assert distance(outcome.value(str(number)), expected) < 1e-12
