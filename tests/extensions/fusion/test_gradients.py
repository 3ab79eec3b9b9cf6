"""Losses that are no means over samples, sums of user code and closures: in an array each is what it is alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freetrain_parsl.protocol.reports import Progress
from tests.extensions.fusion.sweep_trainings import alone, data, distance, network, together

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 9.0], dtype=torch.float64)


def train(session: Any, *, kind: str, lr: float) -> dict[str, Any]:
    """Train with one kind of loss."""
    net, scale = network("mlp", 0.0).double(), nn.Parameter(torch.ones((), dtype=torch.float64))
    parameters = [*net.parameters(), *([scale] if kind == "outside" else [])]
    if kind == "closure":
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(parameters, lr=lr, max_iter=3)
    else:
        optimizer = torch.optim.SGD(parameters, lr=lr)
    session.prepare(net, optimizer)
    losses = []
    loader = session.loader(data(), batch_size=26)
    for _ in session.epochs(3):
        for x, y in loader:
            if kind == "closure":
                session.step(lambda x=x, y=y: cross_entropy(net(x), y))
                losses.append(session.batch_loss)
                continue
            out = net(x)
            if kind == "sum":
                loss = cross_entropy(out, y, reduction="sum")
            elif kind == "weights":
                loss = cross_entropy(out, y, weight=WEIGHTS)
            elif kind == "outside":
                loss = cross_entropy(out * scale, y)
            elif kind == "gather":
                loss = (
                    cross_entropy(session.gather(out), session.gather(y)) + session.all_reduce(out.sum(0)).pow(2).mean()
                )
            session.step(loss)
            losses.append(session.batch_loss)
    return {"model": dict(net.state_dict()), "scale": scale.detach(), "losses": losses, **session.metrics}


@pytest.mark.parametrize("kind", ["sum", "weights", "outside", "gather", "closure"])
def test_each_member_is_what_it_is_alone(tmp_path: Path, kind: str) -> None:
    points = [{"kind": kind, "lr": lr} for lr in (0.001, 0.002, 0.003)]
    reasons: dict[str, str] = {}

    def note(name: str, report: Any) -> None:
        if isinstance(report, Progress):
            reasons[name] = report.not_fused

    outcome = together(tmp_path / "array", points, train, on_report=note)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, train)
        assert distance(outcome.value(str(number)), value) < 1e-10
        assert kind != "outside" or value["scale"] != 1
    if kind == "closure":
        assert set(reasons.values()) == {"its LBFGS evaluates the loss several times in a step"}
    else:
        assert not outcome.engine.reason
        assert outcome.engine.fused_steps > 0
