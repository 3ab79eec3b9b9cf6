"""A sharded job with replicas, in which processes are killed; in a separate module because the crew imports it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import training_crew
from sharded_trainings import whole
from torch import nn
from torch.nn.functional import cross_entropy

from freetrain_parsl.training.group import replica_groups
from freetrain_parsl.training.group.replica_groups import ReplicaGroups

if TYPE_CHECKING:
    from pathlib import Path


class Net(nn.Module):
    """Two blocks, a parameter that is not sharded if `root_too` is false, and rows that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return scaled


def train_replicas(  # noqa: C901 - one option for each point of a kill
    session: Any,
    *,
    shard: bool = True,
    root_too: bool = True,
    epochs: int = 2,
    batch_size: int = 7,
    samples: int = 52,
    clip: float | None = 0.5,
    kill: tuple[str, int, tuple[int, ...]] = ("", -1, ()),
    gates: dict[int, Path] | None = None,
    **loader: Any,
) -> dict[str, Any]:
    """Train in float64; `kill`: where, in which step, and which ranks. Return losses, parameters and states."""
    from torch.distributed.fsdp import fully_shard

    model = Net().double()
    if shard:
        fully_shard(model.first, mesh=session.mesh)
        fully_shard(model.second, mesh=session.mesh)
        if root_too:
            fully_shard(model, mesh=session.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    point, at, ranks = kill
    here = {"now": False}

    def die(*_: Any) -> None:
        if here["now"]:
            os.kill(os.getpid(), signal.SIGKILL)

    if point == "forward":
        model.second.register_forward_pre_hook(die)
    elif point == "backward":  # some gradients are reduced, some are not
        model.first.register_full_backward_pre_hook(die)
    elif point == "hook" and session.rank in ranks:
        original = ReplicaGroups.sum_gradient

        def fatal(groups: ReplicaGroups, gradient: torch.Tensor) -> None:
            original(groups, gradient)  # of the second block: the first one's is not summed
            die()

        ReplicaGroups.sum_gradient = fatal  # type: ignore[method-assign]  # of a process that is killed
    elif point == "forming" and session.rank in ranks:
        replica_groups._group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    elif point == "optimizer":
        optimizer.register_step_pre_hook(die)
    data = session.loader(training_crew.Data(samples), batch_size, **loader)
    same = list(map(id, model.parameters()))
    steps = 0
    for _ in session.epochs(epochs):
        for x, y in data:
            here["now"] = session.metrics["steps"] == at and session.rank in ranks and session.world_size > 2
            session.backward(cross_entropy(model(x.double()), y))
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            session.step()
            scheduler.step()
            steps += 1
            if point == "between":
                here["now"] = session.metrics["steps"] == at + 1 and session.rank in ranks and session.world_size > 2
                die()
            gate = (gates or {}).get(session.metrics["steps"])
            if gate is not None:
                gate.with_suffix(f".{session.rank}").touch()
                while not gate.exists():
                    time.sleep(0.002)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {
        **session.metrics,
        "parameters": {name: whole(value) for name, value in model.state_dict().items()},
        "states": {
            f"{number} {key}": whole(value)
            for number, parameter in enumerate(model.parameters())
            for key, value in optimizer.state[parameter].items()
        },
        "same": same == list(map(id, model.parameters())),
        "members": session.world_size,
        "made": steps,
        "largest": max(p.to_local().numel() / p.numel() for p in model.parameters() if hasattr(p, "to_local"))
        if shard
        else 1.0,
    }


def shard_with_an_int(session: Any) -> str:
    """Shard with an integer ``reshard_after_forward``."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Net().double(), mesh=session.mesh, reshard_after_forward=2)
    session.prepare(model, torch.optim.SGD, lr=0.1)
    return "made"
