"""Training jobs of sweeps: a function that uses much of a session, several networks, and ways to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
from freetrain_parsl.extensions.fusion.slot.run import run_members
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Finished, Membership, Paused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.fusion.engine.engine import FusionEngine
    from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1))
        self.score = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.points(x.view(len(x), 3, -1)).amax(2))


class CharacterLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Linear(6, 10)
        self.memory = nn.LSTM(10, 12, batch_first=True)
        self.score = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.memory(self.symbol(x.view(len(x), 4, 6)))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.symbol = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.score = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.layer(self.symbol(x.view(len(x), 4, 6))).mean(1))


def network(kind: str, dropout: float) -> nn.Module:
    """Make a network for inputs of 24 numbers and four classes."""
    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(24, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )
    if kind == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 4, 6)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(24, 4),
        )
    return {"pointnet": PointNet, "lstm": CharacterLstm, "transformer": lambda: Transformer(dropout)}[kind]()


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return 52 samples, so that the last of the batches of 16 is incomplete."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(52, 24, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(0, 4, (52,), generator=generator))


def classify(  # what a sweep may vary
    session: Any,
    *,
    kind: str = "mlp",
    lr: float = 0.01,
    weight_decay: float = 0.0,
    dropout: float = 0.2,
    clip: float | None = None,
    optimizer: str = "Adam",
    options: Mapping[str, Any] = {},
    penalty: float = 0.0,
    schedule: int = 0,
    epochs: int = 3,
    stop_above: float | None = None,
    fail_at: int | None = None,
    dtype: torch.dtype = torch.float64,
    noise: float = 0.0,
    micro_batch: int | None = None,
) -> dict[str, Any]:
    """Train, and return everything that two ways of training must agree on."""
    samples = data(dtype)
    net = network(kind, dropout).to(dtype)
    maker = getattr(torch.optim, optimizer)
    decay = {"weight_decay": weight_decay} if weight_decay else {}
    model, steps, scheduler = session.prepare(
        net,
        made := maker(net.parameters(), lr=lr, **decay, **options),
        torch.optim.lr_scheduler.StepLR(made, max(1, schedule), 0.5 if schedule else 1.0),
    )
    batches = session.loader(samples, batch_size=16, micro_batch=micro_batch)
    losses: list[float] = []
    for _ in session.epochs(epochs):
        for x, y in batches:
            if fail_at == len(losses):
                raise ValueError("as asked")
            noisy = x + noise * torch.randn_like(x) if noise else x
            loss = functional.cross_entropy(model(noisy), y)
            if penalty:
                loss = loss + penalty * sum(p.square().sum() for p in model.parameters())
            if clip is None:
                session.step(loss)
            else:
                session.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                session.step()
            scheduler.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            inputs, labels = (tensor.to(session.device) for tensor in samples.tensors)
            session.log(val=functional.cross_entropy(model(inputs), labels).item())
        model.train()
        if stop_above is not None and session.metrics["history"][-1]["loss"] > stop_above:
            break
    return {
        "metrics": session.metrics,
        "losses": losses,
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": steps.state_dict(),
        "draws": torch.rand(3),
    }


@dataclass
class Outcome:
    """How the training jobs of an array ended, by name, and its engine."""

    engine: FusionEngine
    ends: dict[str, Finished | Paused | BaseException] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        end = self.ends[name]
        if isinstance(end, BaseException):
            raise end
        assert isinstance(end, Finished)
        return end.value


def member(function: Callable[..., Any], options: SessionOptions, point: Mapping[str, Any]) -> Member:
    """Return a member of an array."""
    return Member(options, lambda: (function, (), point))


def together(
    root: Path,
    points: Sequence[Mapping[str, Any]],
    function: Callable[..., Any] = classify,
    *,
    seeds: Sequence[int] | None = None,
    sizing: ArraySizing | None = None,
    mailbox: ArrayMailbox | None = None,
    on_report: Callable[[str, Any], None] = lambda _name, _report: None,
) -> Outcome:
    """Train all points of a sweep as one array; its training jobs are called ``0``, ``1`` and so on."""
    mailbox = mailbox or ArrayMailbox()
    ends: dict[str, Finished | Paused | BaseException] = {}
    members = [
        member(function, SessionOptions(str(number), root, seed=0 if seeds is None else seeds[number]), point)
        for number, point in enumerate(points)
    ]
    engine = run_members(members, mailbox, report=on_report, ended=ends.__setitem__, sizing=sizing)
    return Outcome(engine, ends)


def alone(
    root: Path, name: str, point: Mapping[str, Any], function: Callable[..., Any] = classify, *, seed: int = 0
) -> Any:
    """Train one point by itself; return what the function returned."""
    mailbox = ControlMailbox()
    end = run_fragment(
        function,
        kwargs=point,
        options=SessionOptions(name, root, seed=seed),
        membership=Membership(name),
        meet=no_store,
        mailbox=mailbox,
        report=lambda _report: None,
    )
    assert isinstance(end, Finished)
    return end.value


def no_store(membership: Membership) -> Any:
    raise AssertionError(f"{membership.trainer} is alone")


def distance(one: Any, other: Any) -> float:
    """Return the largest difference between the numbers of two results of the same structure."""
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((distance(value, other[key]) for key, value in one.items()), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max((distance(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    assert one == other
    return 0.0
