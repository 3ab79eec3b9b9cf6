"""A crew of warm processes that run fragments together, and small trainings for them.

In a module of its own, not in ``conftest.py``, because the spawned processes import it.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import random
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freetrain_parsl.errors import PeerLost
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
from freetrain_parsl.training.terms import Ready, Regroup, Regrouped
from freetrain_parsl.training.transfer import pass_on

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

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
    gates: dict[int, Path] | None = None,
    **loader: Any,
) -> dict[str, Any]:
    """Train with Adam and a scheduler; ask for a pause, die, or wait for a file, after a number of steps."""
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


def diverge(session: Any) -> None:
    """Make the loss infinite after some steps."""
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(3):
        for x, y in data:
            factor = math.nan if session.metrics["steps"] == 4 else 1.0
            session.step(cross_entropy(model(x), y) * factor)


def lag(session: Any, *, at: int, rank: int = 1, **kwargs: Any) -> dict[str, Any]:
    """Train; at a step, one member takes the others for lost just after they had the gradients."""
    make = session.step

    def step(loss: torch.Tensor) -> bool:
        stepper = session._engine.stepper
        complete = stepper._sum.complete
        if session.metrics["steps"] == at and session.rank == rank:

            def complete_and_lose(*arguments: Any) -> None:
                stepper._sum.complete = complete
                complete(*arguments)
                raise PeerLost("a network that fails for this member only")

            stepper._sum.complete = complete_and_lose
        return make(loss)

    session.step = step
    return classify(session, **kwargs)


def pass_states(session: Any) -> bool:
    """Send a state of all kinds from the first two members to the others; whether it arrived as it was."""
    group = session._engine.group
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
    """Whether two states are equal, in type too."""
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
    """How a training ended in one member."""

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
    notice: Notice | None = None,
    tell: Any = lambda _report: None,
    name: str = "net",
    **options: Any,
) -> Outcome:
    """Run a training here; errors become text, so that they travel."""
    if notice is None:
        notice = NOTICE
        notice.pause_requested.clear()
    reports: list[Any] = []

    def report(item: Any) -> None:
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
            notice=notice,
            report=report,
        )
    except Exception as problem:  # noqa: BLE001 - whatever it is, the test wants to know
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(end, error, tuple(reports), os.getpid(), time.monotonic() - begun)


def member_loop(pipe: Connection, address: Any, key: bytes) -> None:
    """Run trainings as told until the connection closes; orders come while they run."""
    torch.set_num_threads(1)
    server = DictionaryServer(address, key)
    server.connect()
    dictionary = server.dictionary()
    dictionary.check([])  # connect now: a connection made while a group forms would be taken for the group's
    store = RendezvousStore(dictionary, timedelta(seconds=60))
    work: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sending = threading.Lock()

    def send(number: int, what: str, content: Any) -> None:
        with sending:
            pipe.send((number, what, content))

    def listen() -> None:
        while True:
            try:
                what, content = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            if what == "run":
                global NOTICE  # noqa: PLW0603 - trainings that pause themselves find it there; new before any order for it comes
                NOTICE = Notice()
                work.put((content, NOTICE))
            elif what == "order":
                NOTICE.order(content)
            elif what == "pause":
                NOTICE.pause_requested.set()
            elif what == "end":
                NOTICE.end()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        (number, function, kwargs, options), notice = work.get()
        send(
            number,
            "ended",
            run_member(
                function,
                kwargs,
                meet=lambda _membership: store,
                notice=notice,
                tell=lambda report, number=number: send(number, "report", report),
                **options,
            ),
        )


class Member:
    """One process of the crew."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.reports: list[Any] = []
        self.outcome: Outcome | None = None
        self.lost = False
        self.numbers = itertools.count(1)
        self.number = 0
        """Of the training that it was told to run last."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.number == 0 or self.outcome is not None

    def receive(self) -> tuple[str, Any]:
        """Take a message, if it is about the training that it runs."""
        number, what, content = self.pipe.recv()
        if number != self.number:
            return "", None
        if what == "report":
            self.reports.append(content)
        elif what == "ended":
            self.outcome = content
        return what, content

    def tell(self, what: str, content: Any = None) -> None:
        with suppress(BrokenPipeError):  # it was killed a moment ago
            self.pipe.send((what, content))

    def last(self, kind: type) -> Any:
        """Return its last report of a kind."""
        return next((report for report in reversed(self.reports) if isinstance(report, kind)), None)


class Crew:
    """Processes that stay warm between trainings; one that was killed is replaced at its next use."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._server = DictionaryServer(("127.0.0.1", 0), b"crew", ctx=self._context)
        self._server.start()
        self._members: list[Member] = []
        self.generations = itertools.count(1)

    def start(self, world_size: int, root: Path, function: Any = classify, **settings: Any) -> CrewRun:
        """Begin a training on that many members; see `CrewRun`."""
        self._members = [member for member in self._members if member.process.is_alive()]
        return CrewRun(self, world_size, root, function, **settings)

    def run(self, world_size: int, root: Path, function: Any = classify, **settings: Any) -> list[Outcome | None]:
        """Run a training on that many members; ``None`` for a member that died."""
        return self.start(world_size, root, function, recover=False, **settings).outcomes()

    def warm(self, count: int) -> None:
        """Have that many processes ready."""
        with tempfile.TemporaryDirectory() as scratch:
            self.run(count, Path(scratch), classify, epochs=1)

    def idle(self, count: int, busy: list[Member]) -> list[Member]:
        """Return that many members that have nothing to do and are not among `busy`."""
        for member in self._members:
            if member not in busy and not member.is_idle:  # the end of its last training is on its way
                with suppress(EOFError, ConnectionResetError):
                    while member.pipe.poll(5) and member.receive()[0] != "ended":
                        pass
                if not member.is_idle:  # a test that failed left it waiting
                    member.process.kill()
                    member.process.join()
        free = [m for m in self._members if m not in busy and m.is_idle and m.process.is_alive()]
        while len(free) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=member_loop, args=(theirs, self._server.address, b"crew"), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append(Member(process, ours))
            free.append(self._members[-1])
        return free[:count]

    def close(self) -> None:
        """Let all members go."""
        for member in self._members:
            member.pipe.close()
            member.process.join(10)
            if member.process.is_alive():
                member.process.kill()
        self._server.shutdown()


class CrewRun:
    """One training of a crew, with what a driver does: starting newcomers, giving orders, answering losses.

    Parameters
    ----------
    crew, world_size, root, function, kwargs
        Who trains what, and where the checkpoints are.
    recover
        Whether those who lose a member are told to go on without it.
    """

    def __init__(
        self,
        crew: Crew,
        world_size: int,
        root: Path,
        function: Any,
        *,
        timeout: float = 60,
        name: str = "net",
        options: dict[str, Any] | None = None,
        recover: bool = True,
        **kwargs: Any,
    ) -> None:
        self._crew = crew
        self._settings = {"root": root, "name": name, **(options or {})}
        self._name, self._timeout = name, timeout
        self._function, self._kwargs = function, kwargs
        self._recover = recover
        self.gone: list[Member] = []
        self.newcomers: list[Member] = []
        self.members = crew.idle(world_size, [])
        for member, membership in zip(self.members, self._memberships(world_size), strict=True):
            self._begin(member, membership)

    @property
    def progress(self) -> Progress | None:
        """The last progress that anybody told."""
        told = [member.last(Progress) for member in (*self.members, *self.gone)]
        return max((progress for progress in told if progress), key=lambda progress: progress.step, default=None)

    def until(self, condition: Any, seconds: float = 60.0) -> Any:
        """Pass messages until `condition` holds, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._pump()
            if value := condition():
                return value
        raise TimeoutError(f"not within {seconds} s; {[m.reports[-2:] for m in self.members]}")

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return all(member.outcome or member.lost for member in self.members)

    def regroup(self, size: int, *, replace: int = 0, release: Any = lambda: None) -> None:
        """Go on with that many members, `replace` of the present ones leaving even if there is room for them.

        `release` is called when all have their orders.
        """
        stay = self.members[: max(1, min(size, len(self.members) - replace))]
        self.gone = [member for member in self.gone if not member.outcome and not member.lost]
        self.newcomers = self._crew.idle(size - len(stay), [*self.members, *self.gone])
        for member in self.newcomers:
            self._begin(member, None)
        self.until(lambda: self.ended or all(member.last(Ready) for member in self.newcomers))
        newcomers, self.newcomers = self.newcomers, []
        leavers = [member for member in self.members if member not in stay]
        self.order([*stay, *newcomers], leavers, release=release)

    def order(
        self, members: list[Member], leavers: list[Member], *, abort: bool = False, release: Any = lambda: None
    ) -> None:
        """Order a regroup and wait until it is done."""
        memberships = self._memberships(len(members))
        generation = memberships[0].generation
        for member in leavers:
            member.tell("order", Regroup(None, abort))
        for member, membership in zip(members, memberships, strict=True):
            member.tell("order", Regroup(membership, abort))
        self.members = members
        self.gone += leavers
        release()
        self.until(
            lambda: (
                self.ended
                or all(
                    m.outcome or m.lost or ((told := m.last(Regrouped)) and told.generation >= generation)
                    for m in self.members
                )
            )
        )

    def pause(self, release: Any = lambda: None) -> list[Outcome | None]:
        """Save and end."""
        self._tell_all("pause")
        release()
        return self.outcomes()

    def kill(self, rank: int) -> None:
        """SIGKILL a member."""
        os.kill(self.members[rank].process.pid, signal.SIGKILL)

    def outcomes(self) -> list[Outcome | None]:
        """Wait for the end; ``None`` for a member that died."""
        self.until(lambda: self.ended, 120)
        return [member.outcome for member in self.members]

    def _memberships(self, size: int) -> list[Membership]:
        generation = next(self._crew.generations)
        meeting = timedelta(seconds=self._timeout)
        return [Membership(self._name, generation, rank, size, meeting=meeting, interface="lo") for rank in range(size)]

    def _begin(self, member: Member, membership: Membership | None) -> None:
        member.reports, member.outcome, member.lost, member.number = [], None, False, next(member.numbers)
        options = {**self._settings, "membership": membership}
        member.tell("run", (member.number, self._function, self._kwargs, options))

    def _pump(self) -> None:
        known = {m.pipe: m for m in (*self.members, *self.newcomers, *self.gone) if not m.lost}
        for pipe in multiprocessing.connection.wait(known, 0.05):
            member = known[pipe]
            try:
                what, content = member.receive()
            except (EOFError, ConnectionResetError):
                self._lose(member)  # passes messages itself: who else was ready may not be any more
                return
            if what == "ended":
                failed = content.error and not content.error.startswith("PeerLost")
                if failed or isinstance(content.end, Finished):
                    self._tell_all("end")

    def _lose(self, member: Member) -> None:
        member.lost = True
        if member in self.members and self._recover:
            survivors = [other for other in self.members if not other.lost and not other.outcome]
            self.members = [other for other in self.members if other is not member]
            if survivors:
                self.order(survivors, [], abort=True)
        elif member in self.members:
            self._tell_all("end")

    def _tell_all(self, what: str) -> None:
        for member in (*self.members, *self.newcomers):
            if not member.lost and not member.outcome:
                member.tell(what)
