"""Training jobs whose processes come to differ, and some that only look so; the processes of the crew import them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from habits import hold
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from training_crew import Data, net

from freetrain_parsl.training.replicas import check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which each process computes from its own share."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = net()
        self.register_buffer("mean", torch.zeros(6), persistent=how != "not persistent")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.see(x)
        return self.net(x - (0 if self.how == "not persistent" else self.mean))

    def see(self, x: torch.Tensor) -> None:
        match self.how:
            case "in place":
                self.mean.lerp_(x.mean(0), 0.1)
            case "reassigned":
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            case "not persistent":  # of another shape on each process
                self.mean = x.sum(1)


def batches(
    session: Any, model: nn.Module, *, epochs: int = 2, samples: int = 48, batch_size: int = 8, **loader: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Optimizer]]:
    """Yield the batches of all epochs, with the optimizer."""
    _, optimizer = session.prepare(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    data = session.loader(Data(samples), batch_size, **loader)
    for _ in session.epochs(epochs):
        for x, y in data:
            yield x, y, optimizer


def die_in_step(session: Any, at: int | None) -> None:
    """Kill the third process while the others wait for its gradients, or soon will."""
    if session.metrics["steps"] == at and session.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


# ── that differ ───────────────────────────────────────────────────────────────────────────────────


def rates(session: Any) -> None:
    model = net()
    for x, y, optimizer in batches(session, model):
        optimizer.param_groups[0]["lr"] = 0.1 + 0.5 * session.rank
        session.step(cross_entropy(model(x), y))


def rates_of_the_loss(session: Any) -> None:
    model = net()
    for x, y, optimizer in batches(session, model):
        loss = cross_entropy(model(x), y)
        optimizer.param_groups[0]["weight_decay"] = 1e-3 * loss.item()
        session.step(loss)


def noise(session: Any) -> None:
    model = net()
    for x, y, _ in batches(session, model):
        session.backward(cross_entropy(model(x), y))
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter) * 0.1)
        session.step()


def statistic(session: Any, *, how: str, **loader: Any) -> torch.Tensor:
    model = Centred(how=how)
    for x, y, _ in batches(session, model, **loader):
        session.step(cross_entropy(model(x), y))
    return model.mean


def frozen(session: Any) -> None:
    model = net()
    for x, y, _ in batches(session, model):
        session.step(cross_entropy(model(x), y))
        if session.metrics["steps"] == 2 and session.rank == 1:
            model[0].bias.requires_grad_(False)


def left_early(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(48), 8)
    for _ in session.epochs(2):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            if session.metrics["steps"] == 2 and session.rank == 1:
                break


def grown(session: Any) -> None:
    model, more = net(), nn.Linear(2, 2)
    for x, y, optimizer in batches(session, model):
        session.step(cross_entropy(model(x), y))
        if session.metrics["steps"] == 2 and session.rank == 0:
            optimizer.add_param_group({"params": more.parameters()})


def perturbed(session: Any, *, at: int = 2, die_at: int | None = None) -> None:
    """Change one weight in the second process, before a step in which the third one may die."""
    model = net()
    for x, y, _ in batches(session, model):
        loss = cross_entropy(model(x), y)
        if session.metrics["steps"] == at and session.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-6
        die_in_step(session, die_at)
        session.step(loss)


def counted_locally(session: Any, *, hold_at: int | None = None) -> None:
    """Compute the learning rate from a local variable, which begins anew in a process that joins."""
    hold(session, hold_at)
    model = net()
    for number, (x, y, optimizer) in enumerate(batches(session, model)):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        session.step(cross_entropy(model(x), y))


# ── that do not ───────────────────────────────────────────────────────────────────────────────────


def network(kind: str) -> nn.Module:
    match kind:
        case "BatchNorm":
            norm: nn.Module = nn.BatchNorm1d(16)
        case "InstanceNorm":
            norm = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())
        case "spectral norm":
            norm = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        case "dropout":
            norm = nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Linear(16, 3))


def usual(
    session: Any, *, kind: str, hold_at: int | None = None, die_at: int | None = None, **loader: Any
) -> list[tuple[int, int]]:
    """Train with an average and a learning rate that is set before each step; return the processes at each step."""
    sizes = hold(session, hold_at)
    model = network(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, average = session.prepare(model, optimizer, AveragedModel(model))
    data = session.loader(Data(52), 12, drop_last=True, **loader)
    for _ in session.epochs(3):
        for x, y in data:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + session.metrics["steps"])
            loss = cross_entropy(model(x), y)
            die_in_step(session, die_at)
            session.step(loss)
            average.update_parameters(model)
    return sizes


def frozen_once(session: Any, *, hold_at: int | None = None, pause_at: int | None = None) -> list[tuple[bool, ...]]:
    """Freeze a layer in the second epoch only; return the flags at the end of each epoch that this process has seen."""
    hold(session, hold_at)
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(48), 8)
    flags = []
    for epoch in session.epochs(4):
        if epoch == 1:
            model[0].requires_grad_(False)
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            if session.metrics["steps"] == pause_at:
                training_mailbox().pause_requested.set()
        flags.append(tuple(parameter.requires_grad for parameter in model.parameters()))
    return flags


def training_mailbox() -> Any:
    import training_crew

    return training_crew.NOTICE


# ── on processors of different kinds ──────────────────────────────────────────────────────────────


def on_unlike_processors(session: Any, *, train: Callable[..., Any], **kwargs: Any) -> Any:
    """Run a training job on processes that take their processors for different ones."""
    rank = session.rank
    kind, check._kind_of_processors = check._kind_of_processors, lambda: rank
    try:
        return train(session, **kwargs)
    finally:
        check._kind_of_processors = kind
