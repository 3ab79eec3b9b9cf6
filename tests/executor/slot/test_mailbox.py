"""Commands reach the run that they name, whether they arrive before its start, while it runs, or after its end."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.executor.slot.node_share import Lane
from freetrain_parsl.executor.slot.place import Pulse
from freetrain_parsl.executor.slot.slot import SlotSettings, _Slot
from freetrain_parsl.protocol.messages import ChangeGroup, PauseRun, Place, SlotHeartbeat
from freetrain_parsl.protocol.reports import PauseReason, Progress, RunPaused
from freetrain_parsl.training import fragment
from freetrain_parsl.training.mailbox import Finished, Paused
from freetrain_parsl.training.node_memory import NodeMemory
from tests.executor.slot.start_run import start_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from freetrain_parsl.protocol.messages import RunEnded


class _FakeChannel:
    """Keeps what the slot sends."""

    url = "tcp://127.0.0.1:55000"

    def __init__(self) -> None:
        self.sent: queue.Queue[RunEnded] = queue.Queue()

    def send(self, message: RunEnded) -> None:
        self.sent.put(message)

    def end_process(self) -> None:
        """Do nothing: it is the tests' process."""


class _Stage:
    """A slot without a separate process: this thread is its channel's, another one its main thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.channel = _FakeChannel()
        slot = self.slot = _Slot.__new__(_Slot)
        slot._memory = NodeMemory("n0", "b0", lambda: None)
        slot._settings = SlotSettings(("127.0.0.1",), 1, None, 1.0, 10.0, 5.0, interface="lo")
        slot._pulse = Pulse(10.0)
        slot._inbox = queue.SimpleQueue()
        slot._assigned = slot._run = slot._closes = None
        slot._lock = threading.Lock()
        slot._leaving = False
        slot._lane, slot._watch, slot._others_save = Lane(), None, 0.0
        slot._channel = self.channel  # type: ignore[assignment]
        self._main = threading.Thread(target=self._work, daemon=True)

    def begin(self) -> None:
        self._main.start()

    def _work(self) -> None:
        while not self.slot._leaving:  # each of its processes runs one training job
            self.slot._work()

    def close(self) -> None:
        self.slot._leave()
        if self._main.is_alive():
            self._main.join(10)

    def start(self, run: int) -> None:
        """Start a run, as the only member of its group."""
        self.slot._handle(start_run(self._directory, run=run, place=Place(run, 0, 1)))

    def pause(self, run: int) -> None:
        self.slot._handle(PauseRun("t", run))

    def regroup(self, run: int, generation: int) -> None:
        self.slot._handle(ChangeGroup("t", run, generation, Place(generation, 0, 1)))

    def ended(self) -> RunEnded:
        return self.channel.sent.get(timeout=20)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Stage]:
    """Its training jobs only wait for a pause; they return the command to regroup that they had received by then."""

    def run_fragment(*_: object, mailbox: Any, **__: object) -> Finished | Paused:
        if not mailbox.pause_requested.wait(10):
            return Finished("no pause came", Progress())
        regroup = mailbox.take_command(0)
        return Paused(PauseReason.REQUESTED, Progress(step=regroup.membership.generation if regroup else 0))

    monkeypatch.setattr(fragment, "run_fragment", run_fragment)
    stage = _Stage(tmp_path)
    yield stage
    stage.close()


def test_commands_that_come_before_their_run_begins_are_carried_out(stage: _Stage) -> None:
    """The main thread may still be busy with the cleanup of the last run."""
    stage.start(7)
    stage.regroup(7, 9)
    stage.pause(7)
    stage.begin()
    ended = stage.ended()
    assert (ended.run, ended.end.progress.step) == (7, 9)
    assert isinstance(ended.end, RunPaused)


def test_no_command_is_lost_at_any_instant_of_a_runs_beginning(stage: _Stage) -> None:
    """Three hundred runs, each paused at a different time after its start command."""
    stage.begin()
    for run in range(1, 301):
        stage.start(run)
        instant = time.perf_counter() + (run % 60) * 2e-5
        while time.perf_counter() < instant:
            pass
        stage.regroup(run, 1000 + run)
        stage.pause(run)
        ended = stage.ended()
        assert (ended.run, ended.end.progress.step) == (run, 1000 + run)
    assert isinstance(ended.end, RunPaused)


def test_a_command_for_a_later_run_waits_for_it_while_another_is_going(stage: _Stage) -> None:
    stage.begin()
    stage.start(1)
    stage.start(2)
    stage.pause(2)
    stage.pause(1)
    assert [stage.ended().run for _ in range(2)] == [1, 2]


def test_a_command_for_a_run_that_is_over_does_nothing_to_the_next(stage: _Stage) -> None:
    stage.begin()
    stage.start(1)
    stage.pause(1)
    assert stage.ended().run == 1
    stage.pause(1)
    stage.regroup(1, 5)
    stage.start(2)
    stage.pause(1)
    with pytest.raises(queue.Empty):
        stage.channel.sent.get(timeout=0.2)
    stage.pause(2)
    ended = stage.ended()
    assert (ended.run, ended.end.progress.step) == (2, 0)


def test_a_beat_names_what_was_assigned_from_its_arrival_to_its_end(stage: _Stage) -> None:
    assert stage.slot._heartbeat() == SlotHeartbeat()
    stage.start(3)
    assert stage.slot._heartbeat() == SlotHeartbeat(run=3)
    stage.begin()
    stage.pause(3)
    stage.ended()
    assert stage.slot._heartbeat() == SlotHeartbeat()
