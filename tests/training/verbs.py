"""Training jobs with losses over tokens, divided validations and common decisions.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import training_crew
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_crew import SAMPLES

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 9
IGNORED = -100


class Sentences:
    """Rows of 0 to 9 tokens in 4 classes; the labels of padding are ignored."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, LENGTH, 6, generator=generator, dtype=torch.float64)
        self.lengths = torch.randint(0, LENGTH + 1, (SAMPLES,), generator=generator)
        labels = torch.randint(0, 4, (SAMPLES, LENGTH), generator=generator)
        self.y = torch.where(torch.arange(LENGTH) < self.lengths[:, None], labels, IGNORED)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[position], self.y[position]


def tagger() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def plain(epochs: int = 2, batch_size: int = 8) -> tuple[torch.Tensor, list[float]]:
    """Train without a session; return the parameters, and the mean loss per token of each epoch."""
    model = tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(epochs):
        total, tokens = 0.0, 0
        for x, y in DataLoader(Sentences(), batch_size=batch_size):  # type: ignore[arg-type]  # map-style
            loss = token_loss(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            number = int((y != IGNORED).sum())
            total, tokens = total + loss.item() * number, tokens + number
        losses.append(total / tokens)
    return flat(model), losses


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def pass_gate(session: Any, gates: dict[int, Path] | None) -> None:
    if gates and (gate := gates.get(session.metrics["steps"])):
        while not gate.exists():
            time.sleep(0.002)


def tag(
    session: Any,
    *,
    epochs: int = 2,
    gates: dict[int, Path] | None = None,
    batches: dict[int, int] | None = None,
    by_backward: bool = False,
    as_tensor: bool = False,
    **loader: Any,
) -> dict[str, Any]:
    """Train on the mean over tokens."""
    model, _ = session.prepare(tagger(), torch.optim.Adam, lr=0.02)
    data = session.loader(Sentences(), 8, shuffle=False, **loader)
    losses = []
    for _ in session.epochs(epochs):
        for x, y in data:
            number = (y != IGNORED).sum()
            items = number if as_tensor else number.item()
            if by_backward:
                complete = session.backward(token_loss(model, x, y), items=items)
                assert complete == session.step()
            elif session.step(token_loss(model, x, y), items=items):
                losses.append(session.batch_loss)
            if batches and (size := batches.get(session.metrics["steps"])):
                training_crew.NOTICE.post_batch(size)
            pass_gate(session, gates)
    return {"parameters": flat(model), "losses": losses, **session.metrics}


def decide(
    session: Any, *, epochs: int = 3, gates: dict[int, Path] | None = None, in_batch: bool = False, stop_at: int = 99
) -> dict[str, Any]:
    """Count samples of a divided validation, and let the first process decide; each process has another opinion."""
    model, _ = session.prepare(tagger(), torch.optim.Adam, lr=0.02)
    data = session.loader(Sentences(), 8, shuffle=False)
    agreed, sums = [], []
    for epoch in session.epochs(epochs):
        for x, y in data:
            if in_batch and session.broadcast([session.rank, session.metrics["steps"] >= stop_at])[1]:
                break
            number = session.all_reduce(torch.tensor(len(x))) if in_batch else len(x)
            if session.step(token_loss(model, x, y), items=(y != IGNORED).sum()) and in_batch:
                sums.append(int(number))
            pass_gate(session, gates)
        if not in_batch:
            mine = torch.arange(SAMPLES)[session.rank :: session.world_size]
            sums.append(int(session.all_reduce(torch.tensor([len(mine)]))))
            agreed.append(session.broadcast({"rank": session.rank, "epoch": epoch, "late": None, "sizes": (1, 2.5)}))
    return {"parameters": flat(model), "sums": sums, "agreed": agreed, "position": session.position, **session.metrics}
