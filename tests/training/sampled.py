"""A training job with a sampler; in a separate module because the processes of the crew import it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, WeightedRandomSampler
from training_crew import SAMPLES, net


class Recorded:
    """A dataset whose samples contain their positions."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int, int]:
        return torch.full((6,), position / SAMPLES), position % 3, position


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + position % 5 for position in range(SAMPLES)], 40, replacement=True)


def by_own_loader() -> DataLoader[Any]:
    return DataLoader(Recorded(), batch_size=8, sampler=weighted())  # type: ignore[arg-type]  # map-style


def train(session: Any, *, epochs: int = 2) -> dict[str, Any]:
    """Train on a weighted sample of the data; return the positions of each epoch as this process saw them."""
    model = net()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = session.loader(Recorded(), 8, sampler=weighted())
    seen: list[list[int]] = []
    for _ in session.epochs(epochs):
        seen.append([])
        for x, y, positions in data:
            session.step(cross_entropy(model(x), y))
            seen[-1] += positions.tolist()
    return {"seen": seen, "audit": session.audit, "state": {k: v.clone() for k, v in model.state_dict().items()}}
