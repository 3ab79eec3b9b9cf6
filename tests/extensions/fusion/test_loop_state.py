"""Members of an array have loop states, orders of preparation and orders of data of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox
from freetrain_parsl.extensions.fusion.slot.run import run_members
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.mailbox import Finished, Paused
from tests.extensions.fusion.sweep_trainings import alone, data, distance, member, network, together

if TYPE_CHECKING:
    from pathlib import Path

POINTS = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]
SEEDS = [4, 5, 6]


def carry(session: Any, *, lr: float, mailbox: Any = None) -> dict[str, Any]:
    """Compute the rate from a counter, average by hand, and prepare in two calls around the loader."""
    model = network("mlp", 0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    average = copy.deepcopy(model)
    session.prepare(model, optimizer)
    batches = session.loader(DataLoader(data(), 16, shuffle=True), order="torch")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, epochs=3, steps_per_epoch=len(batches))
    session.prepare(scheduler)
    state = session.state(it=0, losses=[], average=average)
    for _ in session.epochs(3):
        for x, y in batches:
            loss = functional.cross_entropy(model(x), y) * (1 + state.it / 10)
            session.step(loss)
            scheduler.step()
            state.it += 1
            state.losses.append(loss.item())
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.1)
            if mailbox is not None and state.it == 5:
                mailbox.pause_requested.set()
    states = {"model": model.state_dict(), "average": average.state_dict()}
    return {"it": state.it, "losses": list(state.losses), **copy.deepcopy(states)}


def test_each_member_has_what_it_has_alone(tmp_path: Path) -> None:
    outcome = together(tmp_path / "array", POINTS, carry, seeds=SEEDS)
    for number, (point, seed) in enumerate(zip(POINTS, SEEDS, strict=True)):
        expected = alone(tmp_path / "alone", str(number), point, carry, seed=seed)
        assert distance(outcome.value(str(number)), expected) < 1e-10
        assert expected["it"] == 12
    assert outcome.engine.fused_steps > 0


def test_members_that_were_paused_go_on_with_theirs(tmp_path: Path) -> None:
    """In another array, in the middle of an epoch."""
    mailbox, ends = ArrayMailbox(), {}
    options = [SessionOptions(str(number), tmp_path / "array", seed=seed) for number, seed in enumerate(SEEDS)]
    members = [
        member(carry, each, {**point, "mailbox": mailbox.of(each.name)})
        for each, point in zip(options, POINTS, strict=True)
    ]
    run_members(members, mailbox, report=lambda _name, _report: None, ended=ends.__setitem__)
    assert all(isinstance(end, Paused) for end in ends.values())
    outcome = together(tmp_path / "array", POINTS, carry, seeds=SEEDS)
    for number, (point, seed) in enumerate(zip(POINTS, SEEDS, strict=True)):
        assert isinstance(outcome.ends[str(number)], Finished)
        expected = alone(tmp_path / "alone", str(number), point, carry, seed=seed)
        assert distance(outcome.value(str(number)), expected) < 1e-10
    assert outcome.engine.fused_steps > 0
