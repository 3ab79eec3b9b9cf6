"""The slots that tests make up say what a real slot says: one exchange of messages with each of them.

The real slot trains a small model, alone in its group; its channel is a queue.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch

from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot import training_run
from freetrain_parsl.executor.slot.place import Pulse
from freetrain_parsl.executor.slot.slot import SlotSettings, _Slot
from freetrain_parsl.protocol.codec import Envelope, decode, encode
from freetrain_parsl.protocol.messages import (
    TO_DRIVER,
    ChangeGroup,
    Hello,
    Output,
    PauseRun,
    Place,
    RunEnded,
    RunReport,
    SlotHeartbeat,
    StartRun,
    StoreRequest,
    Values,
)
from freetrain_parsl.protocol.reports import Joined, PauseReason, PeersFailed, Progress, Ready, RunPaused
from freetrain_parsl.training.node_memory import NodeMemory
from tests.executor.driver import driver_bench
from tests.executor.driver.driver_bench import FakeSlot
from tests.executor.jobs.training_world import World
from tests.executor.slot.start_run import start_run
from tests.executor.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from freetrain_parsl.protocol.messages import ToDriver

Command: TypeAlias = StartRun | ChangeGroup | PauseRun


def train_until_stopped(session: Any) -> None:
    """Train on four samples, over and over."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    batches = session.loader([torch.ones(1)] * 4, batch_size=4)
    for _ in session.epochs(10**9):
        for batch in batches:
            session.step(model(batch).mean())


class _Channel:
    """A slot's channel that keeps what is sent."""

    url = "tcp://127.0.0.1:55000"

    def __init__(self, *_: object, **__: object) -> None:
        self.sent: queue.Queue[ToDriver] = queue.Queue()

    def start(self) -> None:
        """Do nothing: it has no thread."""

    def end_process(self) -> None:
        """Do nothing: the test ends the slot's main thread."""

    def send(self, message: ToDriver) -> None:
        self.sent.put(message)

    def next(self) -> ToDriver:
        return self.sent.get(timeout=60)


class _RealSlot:
    """A real slot; this thread is its channel's, another one the main thread of its processes, one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slot_module, "Channel", _Channel)
        monkeypatch.setattr(slot_module, "SignalSocket", lambda *_: None)  # belongs to the process
        monkeypatch.setattr(training_run, "unpack_training", lambda _: (train_until_stopped, (), {}))
        self._slot = _Slot(
            SlotSettings(("127.0.0.1",), 1, None, 1.0, 10.0, 5.0, interface="lo"),
            "token",
            Pulse(10.0),
            NodeMemory("n0", "b0", lambda: None),
        )
        self._main = threading.Thread(target=self._work, daemon=True)
        self._main.start()

    def _work(self) -> None:
        while not self._slot._leaving:
            self._slot._work()

    def introduction(self) -> Hello:
        return self._slot._introduction()

    def heartbeat(self) -> SlotHeartbeat:
        return self._slot._heartbeat()

    def receives(self, command: Command) -> None:
        self._slot._handle(command)

    def says(self) -> ToDriver:
        return self._slot._channel.next()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._slot._leave()
        self._main.join(60)


class _BenchSlot:
    """A slot of `driver_bench`; what its test would let it say is said here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(driver_bench, "Channel", _Channel)
        source = SimpleNamespace(blocks={"b": "job"}, jobs={"job": SimpleNamespace(nodes=("n0",))})
        bench = SimpleNamespace(source=source, server=SimpleNamespace(port=1), heartbeat_timeout=1.0)
        self._slot = FakeSlot(bench, "n0", "token")  # type: ignore[arg-type]
        self._hello = self.says()

    def introduction(self) -> ToDriver:
        return self._hello

    def heartbeat(self) -> SlotHeartbeat:
        return self._slot._heartbeat()

    def receives(self, command: Command) -> None:
        self._slot._handle(command)
        if isinstance(command, StartRun):
            self._slot.progress(1)
        elif command.run != self._slot.run:
            return
        elif isinstance(command, PauseRun):
            self._slot.pause()
        elif command.place is None:
            self._slot.pause(PauseReason.LEFT)
        else:
            self._slot.report(Joined(command.generation, 0.1, 0.0))

    def says(self) -> ToDriver:
        return self._slot.channel.next()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Do nothing: it has no thread."""


class _StageSlot:
    """Slot s0 of a `Stage`; what its test would let it say is said here."""

    def __init__(self, directory: Path) -> None:
        self._stage = Stage(directory)
        self._said: deque[ToDriver] = deque()
        self._is_newcomer = False
        self._stage.manager = SimpleNamespace(  # type: ignore[assignment]
            on_message=lambda _slot, message: self._said.append(message),
        )

    def receives(self, command: Command) -> None:
        if not isinstance(command, StartRun) and command.run != self._stage.runs["s0"]:
            return  # a stage refuses such commands: no driver sends them, except late
        self._stage._send("s0", command)
        if isinstance(command, StartRun):
            self._is_newcomer = command.place is None
            if self._is_newcomer:
                self._stage.ready("s0")
            else:
                self._stage.progress("s0")
        elif isinstance(command, PauseRun):
            end = PeersFailed(0, "dismissed") if self._is_newcomer else RunPaused(PauseReason.REQUESTED)
            self._stage.ends("s0", end)
        elif command.place is None:
            self._stage.ends("s0", RunPaused(PauseReason.LEFT))
        else:
            self._stage.joins("s0")

    def says(self) -> ToDriver:
        return self._said.popleft()

    def close(self) -> None:
        self._stage.journal.close()


class _ModelSlot:
    """A process of the model with which the state machines of training jobs are tested; it acts by itself."""

    def __init__(self) -> None:
        self._world = World()
        self._process = next(iter(self._world.processes.values()))
        self._world.checkpoints["t"] = 0

    def receives(self, command: Command) -> None:
        if isinstance(command, StartRun) or command.run == self._world.runs[self._process.slot]:
            self._world._send(self._process.slot, command)
        else:  # it is checked that no driver sends it, but it may arrive late
            self._process.inbox.append(command)
        self._world._receive(self._process)

    def says(self) -> ToDriver:
        for _ in range(10):
            while self._process.outbox:
                message: ToDriver = self._process.outbox.popleft()
                if not isinstance(message, StoreRequest):  # a real slot needs no store to be alone in its group
                    return message
            self._world._act(self._process)
        raise AssertionError("it says nothing")

    def close(self) -> None:
        """Do nothing: it has no thread."""


AnySlot: TypeAlias = _RealSlot | _BenchSlot | _StageSlot | _ModelSlot
WITH_CHANNEL = ["real", "bench"]


@pytest.fixture
def slot(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnySlot]:
    make: dict[str, Any] = {
        "real": lambda: _RealSlot(monkeypatch),
        "bench": lambda: _BenchSlot(monkeypatch),
        "stage": lambda: _StageSlot(tmp_path),
        "model": _ModelSlot,
    }
    slot = make[request.param]()
    yield slot
    slot.close()


def next_of(slot: AnySlot, kind: type) -> Any:
    """Return what a slot says next, but for progress, output and values; it can be sent and has this type."""
    while True:
        message = slot.says()
        assert decode(encode(Envelope(message)), TO_DRIVER).message == message
        said = message.report if isinstance(message, RunReport) else message
        if isinstance(said, kind) or not isinstance(said, (Progress, Values, Output)):
            assert isinstance(said, kind), message
            return message


def start(slot: AnySlot, directory: Path, run: int) -> None:
    """Start a run in a group of its own, whose first member reports its progress."""
    slot.receives(start_run(directory, run=run, place=Place(run, 0, 1)))
    report = next_of(slot, Progress)
    assert (report.training, report.run, report.report.in_place) == ("t", run, True)


@pytest.mark.parametrize("slot", [*WITH_CHANNEL, "stage", "model"], indirect=True)
def test_a_slot_joins_a_group_pauses_and_leaves_on_command_but_not_on_one_for_another_run(
    slot: AnySlot, tmp_path: Path
) -> None:
    start(slot, tmp_path, 1)
    slot.receives(PauseRun("t", 9))
    slot.receives(ChangeGroup("t", 9, 7, None))
    slot.receives(ChangeGroup("t", 1, 2, Place(2, 0, 1)))
    joined = next_of(slot, Joined)
    assert (joined.training, joined.run, joined.report.generation) == ("t", 1, 2)
    slot.receives(PauseRun("t", 1))
    ended = next_of(slot, RunEnded)
    assert (ended.training, ended.run, ended.payload) == ("t", 1, b"")
    assert (type(ended.end), ended.end.reason) == (RunPaused, PauseReason.REQUESTED)
    start(slot, tmp_path, 3)
    slot.receives(ChangeGroup("t", 3, 4, None))
    ended = next_of(slot, RunEnded)
    assert (ended.training, ended.run, ended.payload) == ("t", 3, b"")
    assert (type(ended.end), ended.end.reason) == (RunPaused, PauseReason.LEFT)


@pytest.mark.parametrize("slot", ["real", "stage", "model"], indirect=True)
def test_a_newcomer_waits_for_its_place_and_leaves_without_the_state_if_it_is_paused(
    slot: AnySlot, tmp_path: Path
) -> None:
    start(slot, tmp_path, 1)
    slot.receives(PauseRun("t", 1))
    next_of(slot, RunEnded)
    slot.receives(start_run(tmp_path, run=2, place=None))
    assert next_of(slot, Ready).run == 2
    slot.receives(PauseRun("t", 2))
    ended = next_of(slot, RunEnded)
    assert (ended.training, ended.run, ended.payload) == ("t", 2, b"")
    assert (type(ended.end), ended.end.generation) == (PeersFailed, 0), "it was in no group"


@pytest.mark.parametrize("slot", WITH_CHANNEL, indirect=True)
def test_a_slot_introduces_itself_and_its_heartbeats_name_its_run(slot: _RealSlot | _BenchSlot, tmp_path: Path) -> None:
    hello = slot.introduction()
    assert isinstance(hello, Hello)
    assert hello.token == "token"
    assert hello.node
    assert hello.fault == ""
    assert slot.heartbeat() == SlotHeartbeat()
    start(slot, tmp_path, 1)
    assert (slot.heartbeat().run, slot.heartbeat().task) == (1, None)
    slot.receives(PauseRun("t", 1))
    next_of(slot, RunEnded)
    assert slot.heartbeat() == SlotHeartbeat()


@pytest.mark.parametrize("slot", ["real"], indirect=True)
def test_a_slot_says_which_run_it_has_although_that_came_before_it_had_cleaned_up_after_the_last(
    slot: _RealSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(slot, tmp_path, 1)
    channel = slot._slot._channel
    send = channel.send

    def send_and_be_answered(message: ToDriver) -> None:
        send(message)
        if isinstance(message, RunEnded) and message.run == 1:
            slot.receives(start_run(tmp_path, run=2, place=Place(2, 0, 1)))

    monkeypatch.setattr(channel, "send", send_and_be_answered)
    slot.receives(PauseRun("t", 1))
    next_of(slot, RunEnded)
    next_of(slot, Progress)
    assert slot.heartbeat().run == 2
