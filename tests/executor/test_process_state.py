"""What a training changes in its process is undone before the next one in the same slot."""

from __future__ import annotations

import gc
import io
import os
import queue
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freetrain_parsl.executor.payloads import pack_training
from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot.process_state import ProcessState, unpack_with_settings
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
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.is_autocast_enabled("cpu"),
        sys.getrecursionlimit(),
        gc.isenabled(),
        signal.getsignal(signal.SIGTERM),
        signal.getitimer(signal.ITIMER_REAL),
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
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    torch.set_autocast_enabled("cpu", True)
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    gc.disable()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(1000)


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
        sys.stdout.detach()
        state.restore()
        assert not sys.stdout.closed
        sys.stdout.close()


MODULE = """
import os
import torch
torch.set_default_dtype(torch.float64)
os.environ["OF_THE_MODULE"] = "1"
class Net(torch.nn.Linear):
    pass
"""


def test_what_a_module_sets_on_import_counts_for_each_training_in_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are imported once: the first training computed in double precision, the second in single precision."""
    (tmp_path / "of_the_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("OF_THE_MODULE", raising=False)
    state = ProcessState()
    namespace: dict[str, Any] = {"__name__": "of_the_user"}
    exec("from of_the_user import Net\ndef train(session):\n    return Net", namespace)
    uses_module = pack_training(namespace["train"], (), {})
    plain: dict[str, Any] = {"__name__": "another"}
    exec("def train(session):\n    pass", plain)
    state.restore()
    sys.modules.pop("of_the_user")  # as in a slot
    found = []
    try:
        for payload in (uses_module, uses_module, pack_training(plain["train"], (), {}), uses_module):
            state.restore()
            unpack_with_settings(payload)
            found.append((torch.get_default_dtype(), os.environ.get("OF_THE_MODULE")))
    finally:
        state.restore()
    set_there = (torch.float64, "1")
    assert found == [set_there, set_there, (torch.float32, None), set_there]


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
