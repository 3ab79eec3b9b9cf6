"""Training jobs with FSDP2, for a crew; in a separate module because its processes import it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import training_crew
from torch.nn.functional import cross_entropy
from training_crew import SAMPLES, Data

if TYPE_CHECKING:
    from pathlib import Path


def classify_sharded(
    session: Any,
    *,
    shard: bool = True,
    root_too: bool = True,
    epochs: int = 2,
    batch_size: int = 8,
    samples: int = SAMPLES,
    clip: float | None = None,
    validate: bool = False,
    pause_after: int | None = None,
    pause_rank: int = 0,
    kill_after: int | None = None,
    kill_rank: int = 0,
    gates: dict[int, Path] | None = None,
    **loader: Any,
) -> dict[str, Any]:
    """Train with Adam and a scheduler; return all unsharded parameters."""
    from torch.distributed.fsdp import fully_shard

    model = training_crew.net()
    if shard:
        fully_shard(model[0], mesh=session.mesh)
        if root_too:
            fully_shard(model, mesh=session.mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    data = session.loader(Data(samples), batch_size, **loader)
    if validate:
        model(Data(samples).x)
    for _ in session.epochs(epochs):
        for x, y in data:
            session.backward(cross_entropy(model(x), y))
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            session.step()
            steps = session.metrics["steps"]
            if gates and (gate := gates.get(steps)):
                gate.with_suffix(".reached").touch()
                while not gate.exists():
                    time.sleep(0.002)
            if steps == kill_after and session.rank == kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if steps == pause_after and session.rank == pause_rank:
                training_crew.NOTICE.pause_requested.set()
        scheduler.step()
        if validate:
            model(Data(samples).x)
    return {**session.metrics, "parameters": {name: whole(value) for name, value in model.state_dict().items()}}


def shard_over_any_mesh(session: Any) -> None:
    """Shard without the session's mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    session.prepare(
        fully_shard(training_crew.net(), mesh=init_device_mesh("cpu", (session.world_size,))), torch.optim.SGD
    )


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, sharded or not."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
