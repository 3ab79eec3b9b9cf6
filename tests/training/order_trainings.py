"""Training jobs that prepare in another order, or change their optimizer in the loop; for the crew as well."""

from __future__ import annotations

from typing import Any

import torch
import training_crew
from habits import hold
from loop_trainings import data64, net64
from torch.nn.functional import cross_entropy, softplus


def state_of(*things: Any) -> list[Any]:
    """Return copies of states, to compare them after the training job."""
    return [
        torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, thing.state_dict())
        for thing in things
    ]


def run_loop(session: Any, data: Any, step: Any, epochs: int = 3, pause_at: int | None = None) -> None:
    for epoch in session.epochs(epochs):
        for x, y in data:
            step(epoch, x, y)
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()


def one_cycle(
    session: Any, *, order: str = "loader first", hold_at: int | None = None, pause_at: int | None = None
) -> Any:
    """Make a scheduler that needs the length of the loader."""
    hold(session, hold_at)
    model = net64()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if order == "loader first":
        data = session.loader(data64(), 8)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=3, steps_per_epoch=len(data))
        assert session.prepare(model, optimizer, scheduler) == (model, optimizer, scheduler)
    else:
        session.prepare(model, optimizer)
        data = session.loader(data64(), 8)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=3, steps_per_epoch=len(data))
        if order == "all again":
            session.prepare(model, optimizer, scheduler)
        else:
            assert session.prepare(scheduler) is scheduler

    def step(_epoch: int, x: Any, y: Any) -> None:
        session.step(cross_entropy(model(x), y))
        scheduler.step()

    run_loop(session, data, step, pause_at=pause_at)
    return state_of(model, optimizer, scheduler)


def gan(session: Any, *, calls: int, hold_at: int | None = None, pause_at: int | None = None) -> Any:
    """Prepare two networks and their optimizers in one call or in two."""
    hold(session, hold_at)
    maker, critic = torch.nn.Linear(2, 6).double(), torch.nn.Linear(6, 1).double()
    first, second = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, critic))
    if calls == 1:
        session.prepare(maker, first, critic, second)
    else:
        session.prepare(maker, first)
        session.prepare(critic, second)

    def step(_epoch: int, x: Any, _y: Any) -> None:
        fake = maker(x[:, :2])
        session.step((softplus(-critic(x)) + softplus(critic(fake.detach()))).mean(), optimizer=second)
        session.step(softplus(-critic(fake)).mean(), optimizer=first)

    run_loop(session, session.loader(data64(), 8), step, pause_at=pause_at)
    return state_of(maker, first, critic, second)


def unfreeze(session: Any, *, hold_at: int | None = None, pause_at: int | None = None) -> Any:
    """Add the first layer to the optimizer in the second epoch, with a rate of its own."""
    hold(session, hold_at)
    model = net64()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.02)
    session.prepare(model, optimizer)

    def step(_epoch: int, x: Any, y: Any) -> None:
        session.step(cross_entropy(model(x), y))

    data = session.loader(data64(), 8)
    for epoch in session.epochs(3):
        if epoch == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.005})
        for x, y in data:
            step(epoch, x, y)
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()
    return state_of(model, optimizer)


def own_checkpoint(session: Any, *, pause_at: int | None = None) -> Any:
    """Load an own, older checkpoint after `prepare`, and set a rate, as some scripts do."""
    model = net64()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    file = session.directory / "own.pt"
    if file.exists():
        states = torch.load(file, weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    data = session.loader(data64(), 8)
    for _ in session.epochs(3):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            if session.metrics["steps"] == 2:
                torch.save([model.state_dict(), optimizer.state_dict()], file)
            if session.metrics["steps"] == pause_at:
                training_crew.NOTICE.pause_requested.set()
    return state_of(model, optimizer)
