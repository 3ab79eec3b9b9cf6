"""Ordinary tasks: a task that ends its slots is not run for ever, and one that exits fails."""

from __future__ import annotations

import queue
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from freetrain_parsl.errors import TooManyRestarts, TrainingError
from freetrain_parsl.executor.control.plain_tasks import Task, TaskQueue
from freetrain_parsl.executor.control.slot_registry import Slot, SlotRegistry
from freetrain_parsl.executor.packing import pack_task
from freetrain_parsl.executor.payloads import error_in
from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot.slot import SlotSettings, _Slot
from freetrain_parsl.protocol.messages import StartTask, TaskEnded


@pytest.mark.parametrize("crash", [True, False])
def test_a_task_is_run_again_until_its_slots_have_crashed_too_often(crash: bool) -> None:
    """It was run for ever, and ended all slots one after another."""
    registry = SlotRegistry(1)
    started: list[int] = []
    tasks = TaskQueue(registry, 1, lambda _slot, message: started.append(message.task), max_restarts=2)
    tasks.lent = frozenset({"n"})
    future: Future[Any] = Future()
    tasks.submit(Task(7, b"function", future))
    for number in range(5):
        slot = Slot(f"s{number}", "token", "n", "b", heard=0.0)
        registry.slots[slot.name] = slot
        registry.completes(slot)
        tasks.serve()
        del registry.slots[slot.name]
        registry.incomplete(slot)
        tasks.on_lost(slot, "its process ended: killed", crash=crash)
    if crash:
        assert started == [7, 7, 7]
        with pytest.raises(TooManyRestarts, match=r"failed 3 times together with its slot, .*: killed"):
            future.result(0)
    else:
        assert started == [7] * 5
    assert tasks.waiting is not crash


def test_a_task_that_calls_exit_fails_and_its_slot_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: queue.SimpleQueue[TaskEnded] = queue.SimpleQueue()
    monkeypatch.setattr(slot_module, "Channel", lambda *_, **__: SimpleNamespace(send=sent.put))
    monkeypatch.setattr(slot_module, "SignalSocket", lambda *_: None)
    slot = _Slot(SlotSettings(("127.0.0.1",), 1, None, 1.0, 10.0, 5.0), "token")
    slot._run_task(StartTask(3, pack_task(sys.exit, (4,), {})))
    ended = sent.get_nowait()
    assert (ended.task, ended.failed) == (3, True)
    error = error_in(ended.payload)
    assert isinstance(error, TrainingError)
    assert str(error) == "the app raised SystemExit: 4"
