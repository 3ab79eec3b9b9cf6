"""Training jobs that carry state from step to step, for one process and for groups that change.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import copy
import math
import os
import signal
from collections import deque
from typing import Any

import torch
import training_crew
from habits import hold
from torch import nn
from torch.nn.functional import cross_entropy
from training_crew import Data, fall_behind


def data64(samples: int = 53) -> torch.utils.data.TensorDataset:
    data = Data(samples)
    return torch.utils.data.TensorDataset(data.x.double(), data.y)


def net64() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def carry(
    session: Any,
    *,
    hold_at: int | None = None,
    die_at: int | None = None,
    pause_at: int | None = None,
    before_step: bool = False,
    epochs: int = 3,
) -> dict[str, Any]:
    """Carry a counter that sets the rate, averages in several kinds of containers, a window, and a best value."""
    hold(session, hold_at, die_at)
    model = net64()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = session.loader(data64(), 8)
    average, weights = copy.deepcopy(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    state = session.state(it=0, best=math.inf, at=None, losses=[], window=deque(maxlen=5), average=average)
    more = session.state(weights=weights, total=total, latest=None)
    for epoch in session.epochs(epochs):
        for x, y in data:
            if before_step:
                state.it += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + (state.it - before_step) / 10)
            session.step(cross_entropy(model(x), y))
            if not before_step:
                state.it += 1
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.1)
                for name, new in model.named_parameters():
                    weights[name].lerp_(new, 0.1)
            loss = session.batch_loss
            total += loss
            state.losses.append(loss)
            state.window.append(loss)
            more.latest = {"loss": torch.tensor(loss, dtype=torch.float64), "place": (epoch, state.it)}
            if loss < state.best:
                state.best, state.at = loss, session.metrics["steps"]
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()
    assert total is more.total
    assert weights is more.weights
    assert average is state.average
    return {
        "it": state.it,
        "steps": session.metrics["steps"],
        "losses": list(state.losses),
        "window": list(state.window),
        "best": state.best,
        "at": state.at,
        "average": {name: tensor.clone() for name, tensor in average.state_dict().items()},
        "weights": dict(weights),
        "total": total,
        "latest": more.latest,
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
    }


def stop_by_count(session: Any, *, die_at: int, last: int) -> tuple[int, int]:
    """Leave the loops by a counter; the second process dies in the last step."""
    hold(session, None, die_at)
    model, _ = session.prepare(net64(), torch.optim.SGD, lr=0.1)
    data = session.loader(data64(), 8)
    state = session.state(it=0)
    for _ in session.epochs(100):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            state.it += 1
            if state.it >= last:
                return state.it, session.metrics["steps"]
    raise AssertionError("not stopped")


def change_before_the_step(session: Any, *, die_at: int, large: bool) -> int:
    """Change a tensor in place before the step in which the second process dies."""
    hold(session, None, die_at)
    model, _ = session.prepare(net64(), torch.optim.SGD, lr=0.1)
    data = session.loader(data64(), 8)
    state = session.state(count=torch.zeros(200_000 if large else 1, dtype=torch.float64))
    for _ in session.epochs(2):
        for x, y in data:
            state.count += 1
            session.step(cross_entropy(model(x), y))
    return int(state.count[0])


def two_steps(session: Any, *, guarded: bool, die: bool) -> tuple[int, int]:
    """Count after the first of two steps on a batch; the second process dies between them in the third batch."""
    one, other = net64(), net64()
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
    session.prepare(one, first, other, second)
    data = session.loader(data64(), 8)
    state = session.state(counted=0)
    for _ in session.epochs(2):
        for x, y in data:
            made = session.step(cross_entropy(one(x), y), optimizer=first)
            state.counted += made if guarded else 1
            if die and session.metrics["steps"] == 3 and session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            session.step(cross_entropy(other(x), y), optimizer=second)
    return state.counted, session.metrics["steps"]


def own(session: Any, *, hold_at: int | None = None, pause_at: int | None = None) -> dict[str, Any]:
    """Count the steps of each process for itself; return what this one has counted, from where."""
    hold(session, hold_at)
    model, _ = session.prepare(net64(), torch.optim.SGD, lr=0.1)
    data = session.loader(data64(), 8)
    state = session.state(per_process=True, mine=0, hidden=torch.zeros(2), seen=[])
    shared = session.state(it=0)
    begun = (state.mine, state.hidden.tolist())
    for _ in session.epochs(3):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            state.mine += 1
            state.hidden = state.hidden + 1 + session.rank
            state.seen.append(session.rank)
            shared.it += 1
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()
    return {"begun": begun, "mine": state.mine, "hidden": state.hidden.tolist(), "seen": state.seen, "it": shared.it}


def normalize(session: Any, *, samples: int, hold_at: int | None = None, **loader: Any) -> tuple[int, Any]:
    """Train a network with BatchNorm."""
    hold(session, hold_at)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(session, session.loader(data64(samples), 16, **loader)):
        session.step(cross_entropy(model(x), y))
    return session.metrics["steps"], session.audit


def batches(session: Any, data: Any, epochs: int = 3) -> Any:
    for _ in session.epochs(epochs):
        yield from data


def count_and_fall_behind(session: Any, *, at: int) -> tuple[int, int, int]:
    """Count the steps together and in each process, while one member misses the end of a step that others make."""
    fall_behind(session, at, 1)
    model, _ = session.prepare(net64(), torch.optim.SGD, lr=0.1)
    data = session.loader(data64(), 8)
    state, own = session.state(it=0), session.state(per_process=True, mine=0)
    for x, y in batches(session, data):
        session.step(cross_entropy(model(x), y))
        state.it += 1
        own.mine += 1
    return state.it, own.mine, session.metrics["steps"]


def agree_and_die(session: Any, *, die_at: int, after_step: bool) -> tuple[int, int]:
    """Count on both sides of a decision in which the second process dies, before or after the step."""
    model, _ = session.prepare(net64(), torch.optim.SGD, lr=0.1)
    data = session.loader(data64(), 8)
    state = session.state(it=0, tensor=torch.zeros(1))

    def decide() -> None:
        state.it += 1
        state.tensor += 1
        if session.metrics["steps"] == die_at and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        session.broadcast(session.rank)
        state.it += 1
        state.tensor += 1

    for x, y in batches(session, data):
        if not after_step:
            decide()
        session.step(cross_entropy(model(x), y))
        if after_step:
            decide()
    return state.it, int(state.tensor)


def average_normed(session: Any, *, hold_at: int | None = None) -> dict[str, torch.Tensor]:
    """Average a network with BatchNorm by hand, its running statistics included."""
    hold(session, hold_at)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = session.loader(data64(), 16)
    average = session.state(average=copy.deepcopy(model)).average
    for x, y in batches(session, data):
        session.step(cross_entropy(model(x), y))
        with torch.no_grad():
            for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(new, 0.1)
            for mine, new in zip(average.buffers(), model.buffers(), strict=True):
                mine.copy_(new)
    return {name: parameter.detach().clone() for name, parameter in average.named_parameters()}


def begin_epochs(
    session: Any, *, hold_at: int | None = None, die_at: int | None = None, pause_at: int | None = None
) -> dict[str, Any]:
    """Change the loop's state, a rate and a weight at the head of each epoch, and the rate after each batch."""
    hold(session, hold_at, die_at)
    model, optimizer = session.prepare(net64(), torch.optim.SGD, lr=0.1, momentum=0.9)
    data = session.loader(data64(), 8)
    state = session.state(total=0.0, totals=[])
    for _ in session.epochs(3):
        state.total = 0.0
        optimizer.param_groups[0]["lr"] *= 0.9
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            optimizer.param_groups[0]["lr"] *= 0.99
            state.total += session.batch_loss
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()
        state.totals.append(state.total / len(data))
    return {"totals": list(state.totals), "lr": optimizer.param_groups[0]["lr"], **model.state_dict()}


def prints_the_last_loss(session: Any, *, hold_at: int | None = None, epochs: int = 3) -> list[float]:
    """Use the loss of the last batch after the batches."""
    hold(session, hold_at, None)
    model = net64()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = session.loader(data64(), 8)
    for _ in session.epochs(epochs):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            session.step(loss)
        session.log(last=float(session.all_reduce(loss.detach())))
    return [row["last"] for row in session.metrics["history"]]
