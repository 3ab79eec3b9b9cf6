"""What a training changes in its process is undone before the next one in the same slot."""

from __future__ import annotations

import io
import os
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot.process_state import ProcessState
from freetrain_parsl.executor.slot.slot import SlotSettings, _Slot
from freetrain_parsl.protocol.messages import Place, RunEnded
from freetrain_parsl.protocol.reports import RunFailed
from tests.executor.start_run import start_run


def observed() -> tuple[Any, ...]:
    return (
        Path.cwd(),
        dict(os.environ),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def change_everything(directory: Path) -> None:
    os.chdir(directory)
    os.environ.pop("PATH")
    os.environ["OF_THE_TRAINING"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)


def test_a_training_that_closed_or_replaced_the_standard_streams_leaves_usable_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO(out.fileno(), "w", closefd=False)))
        stderr = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        state = ProcessState()
        sys.stdout.close()
        sys.stderr = io.StringIO()
        state.restore()
        print("goes on")
        assert sys.stderr is stderr
        sys.stdout.close()
        state.restore()
        assert not sys.stdout.closed
        sys.stdout.close()


@pytest.mark.slow  # deterministic algorithms import torch's compiler
def test_each_training_begins_with_the_process_as_the_slot_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Any, ...]] = []

    class Run:
        expendable = True
        source = "0"
        mailbox = SimpleNamespace(close_after=lambda _: None, end=lambda: None)

        def __init__(self, message: Any, **_: object) -> None:
            self.number = message.run

        def deliver(self, _source: str, _lines: bytes) -> None:
            pass

        def perform(self) -> RunEnded:
            found.append(observed())
            change_everything(tmp_path)
            if len(found) == 2:
                slot._leave()
            return RunEnded("t", self.number, RunFailed(), b"")

        def close(self) -> None:
            pass

    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel = SimpleNamespace(url="tcp://127.0.0.1:1", send=sent.put, end_process=lambda: None)
    monkeypatch.setattr(slot_module, "Channel", lambda *_, **__: channel)
    monkeypatch.setattr(slot_module, "SignalSocket", lambda *_: None)
    monkeypatch.setattr(slot_module, "set_process_title", lambda: None)
    monkeypatch.setattr(slot_module, "TrainingRun", Run)
    slot = _Slot(SlotSettings(("127.0.0.1",), 1, None, 1.0, 10.0, 5.0, interface="lo"), "token")
    for run in (1, 2):
        slot._inbox.put(start_run(tmp_path, run=run, place=Place(run, 0, 1)))
    before, initial = observed(), ProcessState()
    try:
        slot._work()
        for state in found:
            assert state == before
        assert observed() != before
    finally:
        initial.restore()
    assert observed() == before
