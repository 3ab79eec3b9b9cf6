"""Plain loops over a ``DataLoader``, and the same loops in a session; for other processes, too.

``python plain_loops.py FILE`` runs the plain loop in a process of its own, and saves its result.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

SAMPLES, EPOCHS = 53, 4


def dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)  # drawn from the global generator
    return TensorDataset(x, (x[:, :3] + x[:, 3:]).argmax(1), torch.arange(SAMPLES))


class Drawn(Sampler[int]):
    """Draws from the global generators of torch, numpy and Python."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        positions = torch.randperm(SAMPLES).tolist()
        np.random.shuffle(positions)  # noqa: NPY002 - as user code does
        random.shuffle(positions)
        return iter(positions)


def make_loader(kind: str) -> DataLoader[Any]:
    data = dataset()
    generator = torch.Generator().manual_seed(5)
    options: dict[str, dict[str, Any]] = {
        "shuffle": {"shuffle": True},
        "drop_last": {"shuffle": True, "drop_last": True},
        "generator": {"shuffle": True, "generator": generator},
        "generator, drop_last": {"shuffle": True, "generator": generator, "drop_last": True},
        "workers": {"shuffle": True, "num_workers": 1},
        "workers that persist": {"shuffle": True, "num_workers": 1, "persistent_workers": True},
        "in order": {},
        "subset": {"sampler": SubsetRandomSampler(range(0, SAMPLES, 2))},
        "weighted": {"sampler": WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 40)},
        "weighted, generator": {"sampler": WeightedRandomSampler(torch.arange(1.0, 54), 40, generator=generator)},
        "replacement": {"sampler": RandomSampler(data, replacement=True, num_samples=70)},
        "several times": {"sampler": RandomSampler(data, num_samples=120)},
        "drawn": {"sampler": Drawn()},
    }
    return DataLoader(data, 8, **options[kind])


KINDS = [
    "shuffle",
    "drop_last",
    "generator",
    "generator, drop_last",
    "workers",
    "workers that persist",
    "in order",
    "subset",
    "weighted",
    "weighted, generator",
    "replacement",
    "several times",
    "drawn",
]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def result_of(model: nn.Module, seen: list[list[int]], losses: list[float]) -> dict[str, Any]:
    return {"model": {name: t.clone() for name, t in model.state_dict().items()}, "seen": seen, "losses": losses}


def plain(kind: str = "shuffle", seed: int = 3, number: int = EPOCHS) -> dict[str, Any]:
    """Train as everybody does."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as user code does
    random.seed(seed)
    model, optimizer = make_model()
    loader = make_loader(kind)
    seen, losses = [], []
    for _ in range(number):
        for x, y, positions in loader:
            seen.append(positions.tolist())
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return result_of(model, seen, losses)


def in_session(session: Any, kind: str = "shuffle", hold_at: int | None = None, pause_at: int | None = None) -> Any:
    """Train in the same way in a session; what a process has seen is its part of the batches."""
    from habits import hold
    from training_crew import NOTICE

    hold(session, hold_at)
    model, _ = session.prepare(*make_model())
    loader = session.loader(make_loader(kind), order="torch")
    state = session.state(losses=[])
    seen = []
    for _ in session.epochs(EPOCHS):
        for x, y, positions in loader:
            seen.append(positions.tolist())
            session.step(cross_entropy(model(x), y))
            state.losses.append(session.batch_loss)
            if session.metrics["steps"] == pause_at:
                NOTICE.pause_requested.set()
    return result_of(model, seen, list(state.losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(plain(), sys.argv[1])
