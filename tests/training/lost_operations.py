"""Training jobs in which a process is killed after an operation of its group, and others miss the operation's result.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from losses import SAMPLES, Net, contrastive, flat, points
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Loss(NamedTuple):
    """After this operation of a group one process is killed, and the processes `behind` have not got its result."""

    operation: int
    killed: int
    behind: tuple[int, ...]


class Losses:
    """Counts the operations of each group of this process, and lets it lose those after which a `Loss` is due."""

    def __init__(self, session: Any, losses: Sequence[Loss]) -> None:
        self._group = session._runtime.members.group
        self._rank = self._group.rank
        self._losses = list(losses)
        self._count = 0
        self._wait = Group._await

    def __enter__(self) -> None:
        def wait(group: Group, work: Any) -> None:
            self._wait(group, work)
            self._ended(group)

        Group._await = wait  # type: ignore[method-assign]  # until the training job ends

    def __exit__(self, *_: object) -> None:
        Group._await = self._wait  # type: ignore[method-assign]

    def _ended(self, group: Group) -> None:
        if group is not self._group:
            self._group, self._count = group, 0
            del self._losses[:1]
        self._count += 1
        if not self._losses or self._count != self._losses[0].operation:
            return
        if self._rank == self._losses[0].killed:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._rank in self._losses[0].behind:
            raise PeerFailed("a network that fails for this member only")


def prepared(session: Any, batch_size: int = 8, **options: Any) -> tuple[Net, Any]:
    model = Net()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model, session.loader(Subset(points(), range(SAMPLES)), batch_size, shuffle=False, **options)


def train(session: Any, *, kind: str, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Train; ranks in `losses` are those in the first group, and each loss is one in a further group."""
    model, data = prepared(session)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                BODIES[kind](session, model, x, y)
    return {"parameters": flat(model), **session.metrics}


def train_at_a_sign(session: Any, *, sign: Path, **kwargs: Any) -> dict[str, Any]:
    """Train, in the processes of the first group not before a file exists."""
    while session.rank >= 0 and not sign.exists():
        time.sleep(0.002)
    return train(session, **kwargs)


def train_by_iterators(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Train with a new iterator for each batch."""
    model, data = prepared(session)
    with Losses(session, losses):
        for _ in session.epochs(2):
            while (batch := next(iter(data), None)) is not None:
                session.step(cross_entropy(model(batch[0]), batch[1]))
    return {"parameters": flat(model), **session.metrics}


def train_in_pieces(session: Any, *, losses: Sequence[Loss] = ()) -> dict[str, Any]:
    """Train with a call for each of two pieces that each process has of a batch."""
    model, data = prepared(session, batch_size=12, micro_batch=2)
    with Losses(session, losses):
        for _ in session.epochs(2):
            for x, y in data:
                session.all_reduce(torch.tensor(len(x)))
                session.step(cross_entropy(model(x), y))
    return {"parameters": flat(model), **session.metrics}


def train_and_count(session: Any) -> dict[str, Any]:
    """Leave the loop with a batch in hand, and count epochs; the second of two processes dies before a call."""
    model, data = prepared(session)
    is_one_of_two = session.world_size == 2
    state = session.state(epochs=0)
    for epoch in session.epochs(4):
        for x, y in data:
            if session.position.samples >= 16:
                break
            session.step(cross_entropy(model(x), y))
        state.epochs += 1
        if is_one_of_two and session.rank == 1 and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        session.broadcast(epoch)
        state.epochs += 1
    return {"parameters": flat(model), "epochs": state.epochs, **session.metrics}


def in_loss(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    session.step(contrastive(session, model, x, y)[0])


def before_step(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    number = session.all_reduce(torch.tensor(len(x)))
    if not session.broadcast(bool(number == 0)):
        session.step(cross_entropy(model(x), y))


def decision_after_step(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    session.step(cross_entropy(model(x), y))
    session.broadcast(session.rank)


def sum_after_step(session: Any, model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    """Sum the hits of a batch, as everybody does."""
    out = model(x)
    session.step(cross_entropy(out, y))
    session.all_reduce((out.argmax(1) == y).sum())


BODIES = {each.__name__: each for each in (in_loss, before_step, decision_after_step, sum_after_step)}
