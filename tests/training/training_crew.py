"""A crew of warm processes that run fragments together, and small trainings for them.

In a module of its own, not in ``conftest.py``, because the spawned processes import it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freetrain_parsl.training.fragment import (
    Finished,
    Membership,
    Notice,
    Paused,
    Progress,
    SessionOptions,
    run_fragment,
)
from freetrain_parsl.training.membership import RendezvousStore

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

SAMPLES = 53
NOTICE = Notice()
"""The notice of the fragment that runs in this process, for trainings that pause themselves."""


class Dictionary:
    """A `KeyValue` in one process, shared by a manager."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"nobody set {key} within {timeout} s")
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None


_SHARED = Dictionary()


def shared_dictionary() -> Dictionary:
    return _SHARED


class DictionaryServer(BaseManager):
    """Serves `_SHARED` of its own process to the members."""


DictionaryServer.register("dictionary", callable=shared_dictionary, exposed=["set", "get", "add", "check", "delete"])


# ── trainings ─────────────────────────────────────────────────────────────────────────────────────


class Data:
    """Seeded vectors of 6 features in 3 classes; remembers nothing."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 6, generator=generator)
        self.y = (self.x[:, :3] + 0.3 * torch.randn(samples, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[position], self.y[position]


def add_noise(x: torch.Tensor) -> None:
    """Make the result depend on torch's, numpy's and Python's generators."""
    x += random.random() * torch.randn_like(x)
    x += np.random.uniform()  # noqa: NPY002 - the global generator is the one under test


def net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def classify(
    session: Any,
    *,
    epochs: int = 3,
    batch_size: int = 8,
    dropout: float = 0.0,
    pause_after: int | None = None,
    pause_rank: int = 0,
    samples: int = SAMPLES,
    noise: bool = False,
    kill_after: int | None = None,
    kill_rank: int = 0,
) -> dict[str, Any]:
    """Train with Adam and a scheduler; ask for a pause, or die, after a number of steps."""
    model = net(dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    data = session.loader(Data(samples), batch_size)
    for _ in session.epochs(epochs):
        for x, y in data:
            if noise:
                add_noise(x)
            session.step(cross_entropy(model(x), y))
            if session.metrics["steps"] == kill_after and session.rank == kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if session.metrics["steps"] == pause_after and session.rank == pause_rank:
                NOTICE.pause_requested.set()
        scheduler.step()
        session.log(lr=scheduler.get_last_lr()[0])
    return session.metrics


class Normed(nn.Sequential):
    """A net with buffers, and a method of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def guess(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1)


def evaluate_on_first(session: Any) -> list[str]:
    """Use the model as if there were no group: validation on one member, own methods, the state."""
    model, _ = session.prepare(Normed(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 12, drop_last=True)  # BatchNorm needs two samples a member
    for _ in session.epochs(2):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
        if session.is_first:
            model.eval()
            for _ in range(3):
                model.guess(Data().x)
            model.train()
    return list(model.state_dict())


def fail(session: Any, *, rank: int) -> None:
    """One member raises an error of its own."""
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for x, y in data:
            if session.rank == rank:
                raise ZeroDivisionError("the user's own mistake")
            session.step(cross_entropy(model(x), y))


# ── the crew ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """How a fragment ended in one member."""

    end: Finished | Paused | None
    error: str
    reports: tuple[Progress, ...]
    pid: int
    seconds: float


def run_member(
    function: Any,
    kwargs: dict[str, Any],
    *,
    root: Path,
    membership: Membership,
    store: Any = None,
    name: str = "net",
    **options: Any,
) -> Outcome:
    """Run one fragment here; errors become text, so that they travel."""
    NOTICE.pause_requested.clear()
    reports: list[Progress] = []
    begun = time.monotonic()
    end, error = None, ""
    try:
        end = run_fragment(
            function,
            (),
            kwargs,
            options=SessionOptions(name, root, **options),
            membership=membership,
            store=store,
            notice=NOTICE,
            report=reports.append,
        )
    except Exception as problem:  # noqa: BLE001 - whatever it is, the test wants to know
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(end, error, tuple(reports), os.getpid(), time.monotonic() - begun)


def member_loop(orders: Connection, address: Any, key: bytes) -> None:
    """Run fragments as ordered until the connection closes."""
    torch.set_num_threads(1)
    server = DictionaryServer(address, key)
    server.connect()
    store = RendezvousStore(server.dictionary(), timedelta(seconds=60))
    while True:
        try:
            function, kwargs, options = orders.recv()
        except EOFError:
            return
        orders.send(run_member(function, kwargs, store=store, **options))


class Crew:
    """Processes that stay warm between fragments; one that was killed is replaced at its next use."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._server = DictionaryServer(("127.0.0.1", 0), b"crew", ctx=self._context)
        self._server.start()
        self._members: list[tuple[Any, Connection]] = []
        self._generation = 0

    def run(
        self,
        world_size: int,
        root: Path,
        function: Any = classify,
        *,
        timeout: float = 60,
        name: str = "net",
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Outcome | None]:
        """Run one fragment on that many members; ``None`` for a member that died."""
        self._members = [(process, pipe) for process, pipe in self._members if process.is_alive()]
        while len(self._members) < world_size:
            self._members.append(self._hire())
        self._generation += 1
        for rank in range(world_size):
            membership = Membership(
                f"{name}", self._generation, rank, world_size, timedelta(seconds=timeout), interface="lo"
            )
            order = {"root": root, "membership": membership, "name": name, **(options or {})}
            self._members[rank][1].send((function, kwargs, order))
        return [self._answer(self._members[rank][1]) for rank in range(world_size)]

    def close(self) -> None:
        """Let all members go."""
        for process, pipe in self._members:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
        self._server.shutdown()

    def _hire(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=member_loop, args=(theirs, self._server.address, b"crew"), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    @staticmethod
    def _answer(pipe: Connection) -> Outcome | None:
        if not pipe.poll(120):
            raise TimeoutError("a member of the crew did not answer")
        try:
            return pipe.recv()
        except EOFError:
            return None
