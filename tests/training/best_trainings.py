"""A training job that keeps its best epoch and stops early; in a module of its own because the crew imports it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import training_crew
from torch import nn
from torch.utils.data import TensorDataset

# Of each epoch; the best is epoch 2, and the third that is not better in a row is epoch 5.
VALUES = [0.5, 0.7, 0.9, 0.8, 0.9, 0.85, 0.95, 0.99]
EPOCHS, STEPS = len(VALUES), 4


def train(
    session: Any,
    *,
    patience: int | None = 3,
    mode: str = "max",
    values: list[float] = VALUES,
    pause_at: int | None = None,
    hold_at: tuple[int, ...] = (),
    die_in: int | None = None,
    disagree: bool = False,
    lr: float = 0.1,
) -> dict[str, Any]:
    """Train; the logged values are given, and those of all processes but the first differ with `disagree`."""
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    model, _ = session.prepare(nn.Linear(4, 1), torch.optim.SGD, lr=lr)
    data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    session.keep_best("accuracy", mode=mode)
    if patience is not None:
        session.stop_early("accuracy", mode=mode, patience=patience)
    weights = []
    for epoch in session.epochs(EPOCHS):
        for a, b in data:
            session.step(nn.functional.mse_loss(model(a), b))
            if (steps := session.metrics["steps"]) in hold_at:
                (session.directory / f"held-{steps}").touch()
                while training_crew.NOTICE.pending is None:
                    time.sleep(0.005)
        if epoch == die_in and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the others wait for it, to compare the epoch
        value = values[epoch]
        session.log(accuracy=1 - value if disagree and not session.is_main_process else value)
        weights.append((epoch, model.weight.detach().clone()))
        if session.metrics["steps"] == pause_at:
            training_crew.NOTICE.pause_requested.set()
    last = model.weight.detach().clone()
    best = session.load_best()
    return {
        "epochs": session.metrics["epochs"],
        "best": (best.epoch, best.value),
        "weights": dict(weights),
        "last": last,
        "loaded": model.weight.detach().clone(),
    }
