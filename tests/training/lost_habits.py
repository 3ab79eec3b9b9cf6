"""Training jobs with habits that matter when a process is killed, and others miss the result of an operation.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from losses import SAMPLES, Net, flat, points
from lost_operations import Losses, prepared
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Subset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lost_operations import Loss


class Counting(Net):
    """A network that counts its forward passes in a buffer, on all processes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)


class Normalizing(nn.Sequential):
    """A network whose running statistics are those of each process's share until they are averaged."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.double()


def in_batches(body: Callable[[Any, Net, torch.Tensor, torch.Tensor], None]) -> Callable[..., dict[str, Any]]:
    """Return a training job with this body of its loop."""

    @functools.wraps(body)
    def train(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
        model, data = prepared(session)
        with Losses(session, losses):
            for _ in session.epochs(2):
                for x, y in data:
                    body(session, model, x, y)
        return {"parameters": flat(model), **session.metrics}

    return train


@in_batches
def decides_by_steps(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    if session.step(cross_entropy(model(x), y)):
        session.broadcast(session.rank)


@in_batches
def decides_by_gradients(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    if session.backward(cross_entropy(model(x), y)):
        session.broadcast(session.rank)
        session.step()


@in_batches
def steps_under_gradients(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    if session.backward(cross_entropy(model(x), y)):
        session.step()
        session.broadcast(session.rank)


def averages_between_steps(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    nets = [Normalizing(), Net()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    average = AveragedModel(nets[1])
    session.prepare(nn.ModuleList(nets), *optimizers, average)
    data = session.loader(Subset(points(), range(SAMPLES)), 8, shuffle=False)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                session.step(cross_entropy(nets[1](x), y), optimizer=optimizers[1])
                average.update_parameters(nets[1])
                session.step(cross_entropy(nets[0](x), y), optimizer=optimizers[0])
    return {"parameters": flat(average), "value": int(average.n_averaged), **session.metrics}


def changes_its_rate(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Change it after a call."""
    return change_rate(session, losses, before=False)


def changes_its_rate_before(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Change it between the step and a call."""
    return change_rate(session, losses, before=True)


def change_rate(session: Any, losses: Sequence[Loss], *, before: bool) -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    data = session.loader(Subset(points(), range(SAMPLES)), 8, shuffle=False)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                session.step(cross_entropy(model(x), y))
                for call in (False, True) if before else (True, False):
                    if call:
                        session.broadcast(session.rank)
                    else:
                        optimizer.param_groups[0]["lr"] *= 0.97
    return {"parameters": flat(model), "value": optimizer.param_groups[0]["lr"], **session.metrics}


def schedules_at_the_top(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.97)
    session.prepare(model, optimizer, scheduler)
    data = session.loader(Subset(points(), range(SAMPLES)), 8, shuffle=False)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                if session.position.samples:
                    scheduler.step()
                session.step(cross_entropy(model(x), y))
    return {"parameters": flat(model), "value": scheduler.last_epoch, **session.metrics}


def counts_passes(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Two steps in a batch, each with a forward pass that changes a buffer."""
    model = Counting()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = session.loader(Subset(points(), range(SAMPLES)), 8, shuffle=False)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                session.step(cross_entropy(model(x), y))
                session.step(cross_entropy(model(x), y))
    return {"parameters": flat(model), "value": float(model.passes), **session.metrics}


def schedules_under_steps(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Two optimizers in turns, each with a scheduler, whose steps are under those of the optimizer."""
    return schedule(session, losses, asks=True)


def schedules_each_step(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Do so without asking whether the step was made."""
    return schedule(session, losses)


def schedules_and_calls(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Do so, with a call at the end of the batch, which may fail after all steps."""
    return schedule(session, losses, calls=True)


def schedule(session: Any, losses: Sequence[Loss], *, asks: bool = False, calls: bool = False) -> dict[str, Any]:
    nets = [Net(), Net()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    schedulers = [ExponentialLR(each, 0.97) for each in optimizers]
    session.prepare(nn.ModuleList(nets), *optimizers, *schedulers)
    data = session.loader(Subset(points(), range(SAMPLES)), 8, shuffle=False)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                for net, optimizer, scheduler in zip(nets, optimizers, schedulers, strict=True):
                    if session.step(cross_entropy(net(x), y), optimizer=optimizer) or not asks:
                        scheduler.step()
                if calls:
                    session.broadcast(session.rank)
    value = [each.last_epoch for each in schedulers]
    return {"parameters": torch.cat([flat(net) for net in nets]), "value": value, **session.metrics}


@in_batches
def reads_its_loss(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    session.step(cross_entropy(model(x), y))
    session.log(every=2, batch_loss=session.batch_loss)


def validates_on_all(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Each process validates on all of the data, with the statistics that it has."""
    model = Normalizing()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = session.loader(Subset(points(), range(SAMPLES)), 16, shuffle=False)
    state = session.state(best=100.0)
    inputs, labels = points().tensors
    with Losses(session, losses):
        for _ in session.epochs(2):
            model.train()
            for x, y in data:
                session.step(cross_entropy(model(x), y))
            model.eval()
            with torch.no_grad():
                state.best = min(state.best, float(cross_entropy(model(inputs), labels)))
    return {"parameters": flat(model)[:0], **session.metrics}  # which depend on how batches are divided


def counts_epochs(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Count before the batches, after them, and between two calls."""
    model, data = prepared(session, batch_size=32)
    state = session.state(begun=0, ended=0, called=0)
    with Losses(session, losses):
        for _ in session.epochs(3):
            state.begun += 1
            for x, y in data:
                session.step(cross_entropy(model(x), y))
            state.ended += 1
            session.broadcast(session.rank)
            state.called += 1
            session.broadcast(session.rank)
    return {"parameters": flat(model), "value": (state.begun, state.ended, state.called), **session.metrics}


def counts_epochs_at_a_sign(session: Any, *, sign: Path, losses: Sequence[Loss]) -> dict[str, Any]:
    """Count, in the processes of the first group not before a file exists."""
    while session.rank >= 0 and not sign.exists():
        time.sleep(0.002)
    return counts_epochs(session, losses=losses)


def leaves_early(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    model, data = prepared(session)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                session.step(cross_entropy(model(x), y))
                if session.position.samples >= 8:
                    break
    return {"parameters": flat(model), **session.metrics}


def iterates_by_hand(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    model, data = prepared(session)
    state = session.state(it=0, seen=[])
    with Losses(session, losses):
        for _ in session.epochs(2):
            while (batch := next(iter(data), None)) is not None:
                session.step(cross_entropy(model(batch[0]), batch[1]))
                state.it += 1
                state.seen.append(state.it)
    return {"parameters": flat(model), "value": (state.it, state.seen), **session.metrics}


HABITS = {
    each.__name__: each
    for each in (
        decides_by_steps,
        decides_by_gradients,
        steps_under_gradients,
        averages_between_steps,
        changes_its_rate,
        changes_its_rate_before,
        schedules_at_the_top,
        counts_passes,
        schedules_under_steps,
        schedules_each_step,
        schedules_and_calls,
        reads_its_loss,
        validates_on_all,
        counts_epochs,
        leaves_early,
        iterates_by_hand,
    )
}
