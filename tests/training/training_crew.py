"""The code that the processes of a crew run, and small training jobs for them; module `crew` starts them.

In a separate module, not in ``conftest.py``, because the spawned processes import it.
"""

from __future__ import annotations

import math
import os
import queue
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

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Logged
from freetrain_parsl.training.fragment import ControlMailbox, Finished, Membership, Paused, run_fragment
from freetrain_parsl.training.group.process_group import join
from freetrain_parsl.training.group.rendezvous import RendezvousStore
from freetrain_parsl.training.group.state_transfer import pass_on
from freetrain_parsl.training.node_memory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

SAMPLES = 53
NOTICE = ControlMailbox()
"""The mailbox of the fragment that runs in this process, for training jobs that pause themselves."""


class Dictionary:
    """A `KeyValue` in one process, shared by a manager."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._abandoned_before = 0

    def abandon(self, before: int) -> None:
        """Fail all waits for keys of generations before this one, as slots do at an abort."""
        with self._changed:
            self._abandoned_before = max(self._abandoned_before, before)
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        generation = min((int(key.split("/")[1]) for key in keys if "/" in key), default=math.inf)
        with self._changed:
            self._changed.wait_for(
                lambda: generation < self._abandoned_before or self._values.keys() >= set(keys), timeout
            )
            if not self._values.keys() >= set(keys):
                raise TimeoutError(f"{', '.join(set(keys) - self._values.keys())} was not set within {timeout} s")
            return [self._values[key] for key in keys]

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


_METHODS = ["abandon", "set", "get", "add", "check", "delete"]
DictionaryServer.register("dictionary", callable=shared_dictionary, exposed=_METHODS)


# ── training jobs ─────────────────────────────────────────────────────────────────────────────────────


class Data:
    """Seeded vectors of 6 features in 3 classes; stateless."""

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
    x += np.random.uniform()  # noqa: NPY002 - the global generator is under test


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
    gates: dict[int, Path] | None = None,
    batches: dict[int, int] | None = None,
    **loader: Any,
) -> dict[str, Any]:
    """Train with Adam and a scheduler; request a pause or another batch size, die, or wait for a file, after steps."""
    model = net(dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    data = session.loader(Data(samples), batch_size, **loader)
    for _ in session.epochs(epochs):
        for x, y in data:
            if noise:
                add_noise(x)
            session.step(cross_entropy(model(x), y))
            if batches and (size := batches.get(session.metrics["steps"])):
                NOTICE.post_batch(size)
            if gates and (gate := gates.get(session.metrics["steps"])):
                while not gate.exists():
                    time.sleep(0.002)
            if session.metrics["steps"] == kill_after and session.rank == kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if session.metrics["steps"] == pause_after and session.rank == pause_rank:
                NOTICE.pause_requested.set()
        scheduler.step()
        session.log(lr=scheduler.get_last_lr()[0])
    return session.metrics


def first_before_the_loop(session: Any, *, gates: dict[int, Path]) -> tuple[bool, int, int]:
    """Train like `classify`; return the session's properties of this process before the loop."""
    before = (session.is_main_process, session.rank, session.world_size)
    classify(session, gates=gates)
    return before


def join_repeatedly(session: Any, *, tries: int, seconds: float, ready: Path, go: Path) -> tuple[int, str]:
    """Form groups, all but the first member late, until one fails; return the number formed and the error."""
    first = session._runtime.members.group
    meet = session._runtime.members._meet
    first.leave()
    ready.with_suffix(f".{first.rank}").touch()
    while not go.exists():
        time.sleep(0.002)
    for number in range(tries):
        if first.rank:
            time.sleep(0.3)
        place = Membership(
            first._trainer,
            1_000_000 * first.generation + number,
            first.rank,
            first.size,
            interface="lo",
            admission=timedelta(seconds=seconds),
        )
        try:
            join(place, meet(place)).leave()
        except PeerFailed as error:
            return number, str(error)
    return tries, ""


class Normed(nn.Sequential):
    """A network with buffers and an additional method."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def guess(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1)


def evaluate_on_first(session: Any) -> list[str]:
    """Use the model as if there were no group: validation on one member, its methods, its state."""
    model, _ = session.prepare(Normed(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 12, drop_last=True)  # BatchNorm needs two samples per member
    for _ in session.epochs(2):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
        if session.is_main_process:
            model.eval()
            for _ in range(3):
                model.guess(Data().x)
            model.train()
    return list(model.state_dict())


def name_interface(session: Any) -> str | None:
    """Return the network interface that NCCL would use for the first gradients."""
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    interface = None
    for _ in session.epochs(1):
        for x, y in data:
            interface = os.environ.get("NCCL_SOCKET_IFNAME")
            session.step(cross_entropy(model(x), y))
    return interface


def fail(session: Any, *, rank: int) -> None:
    """Raise an error on one member."""
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for x, y in data:
            if session.rank == rank:
                raise ZeroDivisionError("a mistake in user code")
            session.step(cross_entropy(model(x), y))


def diverge(session: Any) -> None:
    """Make the loss infinite after some steps."""
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(3):
        for x, y in data:
            factor = math.nan if session.metrics["steps"] == 4 else 1.0
            session.step(cross_entropy(model(x), y) * factor)


def lag(session: Any, *, at: int, rank: int = 1, **kwargs: Any) -> dict[str, Any]:
    """Train like `classify`, see `fall_behind`."""
    fall_behind(session, at, rank)
    return classify(session, **kwargs)


def fall_behind(session: Any, at: int, rank: int) -> None:
    """At a step, let one member consider the others failed just after they received the gradients."""
    make = session.step

    def step(loss: torch.Tensor) -> bool:
        batch_runner = session._runtime.batch_runner
        complete = batch_runner._sum.complete
        if session.metrics["steps"] == at and session.rank == rank:

            def complete_and_lose(*arguments: Any) -> None:
                batch_runner._sum.complete = complete
                complete(*arguments)
                raise PeerFailed("a network that fails for this member only")

            batch_runner._sum.complete = complete_and_lose
        return make(loss)

    session.step = step


def pass_states(session: Any) -> bool:
    """Send a varied state from the first two members to the others; return whether it arrived unchanged."""
    group = session._runtime.members.group
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "numbers": [1, 2.5, None, True, "text", (3, "four")],
        "tensors": (torch.tensor(7), torch.empty(0), tied, tied.t(), torch.ones(3, dtype=torch.bfloat16)),
        "large": torch.randn(700_000, generator=torch.Generator().manual_seed(1)),
        "many": {f"layer {n}": torch.full((n,), float(n)) for n in range(300)},
        3: {"module": nn.BatchNorm1d(4).state_dict()},
    }
    received = pass_on(group, [0, 1], list(range(2, group.size)), state if group.rank < 2 else None)
    return received is None if group.rank < 2 else equal(state, received)


def equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal, including their types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# ── the crew ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """How a training job ended on one member."""

    end: Finished | Paused | None
    error: str
    reports: tuple[Any, ...]
    pid: int
    seconds: float


def run_member(
    function: Any,
    kwargs: dict[str, Any],
    *,
    root: Path,
    membership: Membership | None,
    meet: Any = None,
    mailbox: ControlMailbox | None = None,
    tell: Any = lambda _report: None,
    memory: NodeMemory | None = None,
    name: str = "net",
    next_size: int | None = None,
    **options: Any,
) -> Outcome:
    """Run a training job in this process; errors are converted to text, to be sent."""
    if mailbox is None:
        mailbox = NOTICE
        mailbox.pause_requested.clear()
    reports: list[Any] = []

    def report(item: Any) -> None:
        if not isinstance(item, Logged):  # values for trackers are tested for themselves
            reports.append(item)
            tell(item)

    begun = time.monotonic()
    end, error = None, ""
    try:
        end = run_fragment(
            function,
            (),
            kwargs,
            options=SessionOptions(name, root, **options),
            membership=membership,
            meet=meet,
            mailbox=mailbox,
            report=report,
            memory=memory,
            next_size=next_size,
        )
    except Exception as problem:  # noqa: BLE001 - reported to the test
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(end, error, tuple(reports), os.getpid(), time.monotonic() - begun)


def member_loop(pipe: Connection, address: Any, key: bytes) -> None:
    """Run training jobs on command until the connection closes; further commands arrive while they run."""
    torch.set_num_threads(1)
    server = DictionaryServer(address, key)
    server.connect()
    # As a slot does, on a node of its own; in these tests the processes of one slot are one process.
    memory = NodeMemory(f"node-{os.getpid()}", "block", lambda: (1 << 40, 1 << 40))
    dictionary = server.dictionary()
    dictionary.check([])  # connect now: a connection made while a group forms would be counted as the group's
    store = RendezvousStore(dictionary, timedelta(seconds=60))
    work: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sending = threading.Lock()

    def send(number: int, what: str, content: Any) -> None:
        with sending:
            pipe.send((number, what, content))

    def listen() -> None:
        number, delay = 0, 0.0
        while True:
            try:
                what, content = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            time.sleep(delay)
            if what == "run":
                number = content[0]
                global NOTICE  # noqa: PLW0603 - for training jobs that pause themselves; set before any command for it arrives
                NOTICE = ControlMailbox()
                work.put((content, NOTICE))
            elif what == "order":
                NOTICE.post(content)
            elif what == "pause":
                NOTICE.pause_requested.set()
            elif what == "end":
                NOTICE.end()
            elif what == "hear slowly":
                delay = content
            send(number, "heard", None)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        (number, function, kwargs, options), mailbox = work.get()
        send(
            number,
            "ended",
            run_member(
                function,
                kwargs,
                meet=lambda _membership: store,
                mailbox=mailbox,
                tell=lambda report, number=number: send(number, "report", report),
                memory=memory,
                **options,
            ),
        )
