"""Training jobs whose results would reveal any dependence on the number of processes.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import multiprocessing
import random
from typing import Any

import numpy as np
import torch
from habits import hold
from torch import nn
from torch.nn.functional import cross_entropy
from training_crew import Data

from freetrain_parsl.training.data.loader_options import LoaderOptions


class Augmented(Data):
    """Each sample contains random numbers of all generators."""

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(position)
        noise = torch.randn(6) * random.random() + np.random.uniform()  # noqa: NPY002 - the global generator on purpose
        return x + 0.1 * noise, y


class Recording(Data):
    """Each sample contains its position."""

    def __getitem__(self, position: int) -> Any:
        return (*super().__getitem__(position), position)


class Branches(nn.Module):
    """A network with a branch that is never used, and one that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.always(x)
        chosen = x[:, 0] > 0.8
        return scores.index_add(0, chosen.nonzero()[:, 0], self.sometimes(x[chosen])) if chosen.any() else scores


def network(kind: str) -> nn.Module:
    if kind == "branches":
        return Branches()
    if kind == "normed":
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train(
    session: Any,
    *,
    kind: str = "plain",
    epochs: int = 3,
    batch_size: int = 12,
    hold_at: int | None = None,
    die_at: int | None = None,
    **loader: Any,
) -> dict[str, Any]:
    """Train on augmented samples; return the metrics and the number of processes at each step."""
    sizes = hold(session, hold_at, die_at)
    model, _ = session.prepare(network(kind), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    data = session.loader(Augmented(), batch_size, **loader)
    for _ in session.epochs(epochs):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
    return {"metrics": session.metrics, "sizes": sizes, "audit": session.audit}


def fetch(session: Any, *, hold_at: int | None = None, workers: int = 1) -> dict[str, Any]:
    """Train on samples from worker processes; return the samples, and the workers before and after a change."""
    multiprocessing.current_process()._config["daemon"] = False  # permits members of the crew to have child processes
    sizes = hold(session, hold_at)
    model, _ = session.prepare(network("plain"), torch.optim.SGD, lr=0.1)
    data = session.loader(Recording(), 8, num_workers=workers)
    workers_at: dict[int, set[int | None]] = {}
    seen: list[list[int]] = []
    for _ in session.epochs(2):
        for x, y, positions in data:
            if session.step(cross_entropy(model(x), y)):
                workers_at.setdefault(session.world_size, {child.pid for child in multiprocessing.active_children()})
                seen.append(positions.tolist())
    return {"sizes": sizes, "workers": workers_at, "seen": seen, "audit": session.audit}


def scale(session: Any, *, hold_at: int) -> dict[str, Any]:
    """Train on batches that grow with the number of processes; return the learning rates of the steps."""
    sizes = hold(session, hold_at)
    model = network("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda stepping, *_: rates.append(stepping.param_groups[0]["lr"]))
    session.prepare(model, optimizer)
    data = session.loader(Data(), 6, options=LoaderOptions(scaled=True, ramp=2))
    for _ in session.epochs(2):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
    return {"sizes": sizes, "rates": rates, "audit": session.audit, "left": optimizer.param_groups[0]["lr"]}
