"""A loop with Lightning Fabric, as it is without a session and with two lines changed.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

from typing import Any

import torch
from held import hold
from lightning.fabric import Fabric
from lightning_trainings import points
from torch import nn
from torch.utils.data import DataLoader

from freetrain_parsl.extensions.integrations.fabric import SessionFabric

SAMPLES, BATCH = 144, 16


def train(
    fabric: Any, epochs: Any, *, batch_size: int = BATCH, accumulate: int = 1, clip: float | None = None
) -> dict[str, Any]:
    """Train; `epochs` yields the epochs' numbers, given the scheduler. ``clip``: by value, in place of the norm."""
    limit = {"max_norm": 0.5} if clip is None else {"clip_val": clip}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    data, validation = fabric.setup_dataloaders(
        DataLoader(points(SAMPLES, 0), batch_size=batch_size), DataLoader(points(60, 1), batch_size=30)
    )
    losses = []
    for _ in epochs(scheduler):
        for number, (x, y) in enumerate(data, start=1):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss / accumulate)
            if number % accumulate == 0:
                fabric.clip_gradients(model, optimizer, **limit)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            hits = sum(float((model(x).argmax(1) == y).sum()) for x, y in validation)
        losses.append(float(fabric.all_reduce(torch.tensor(hits), reduce_op="mean")))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"weights": weights, "rate": scheduler.get_last_lr()[0], "hits": losses[-1:]}


def plain(accumulate: int) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", devices=1)
    return train(fabric, lambda _scheduler: range(4), batch_size=BATCH // accumulate, accumulate=accumulate)


def in_session(
    session: Any, *, accumulate: int = 1, clip: float | None = None, disturbances: Any = None, **options: Any
) -> dict[str, Any]:
    hold(session, **(disturbances or {}))
    fabric = SessionFabric(session, accumulate=accumulate, **options)
    result = train(fabric, lambda scheduler: fabric.epochs(4, scheduler), batch_size=BATCH // accumulate, clip=clip)
    return {**result, "audit": (session.audit.samples_lost, session.audit.duplicate_samples)}
