"""Ordinary tasks: a task that ends its slots is not run for ever, and one that exits fails."""

from __future__ import annotations

import importlib
import queue
import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.errors import TooManyRestarts, TrainingError
from freetrain_parsl.executor.driver.plain_tasks import Task, TaskQueue
from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
from freetrain_parsl.executor.payloads.payloads import error_in, pack_task
from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot.place import Pulse
from freetrain_parsl.executor.slot.slot import SlotSettings, _Slot
from freetrain_parsl.interpreters import script_command
from freetrain_parsl.planning.events import TasksWaiting
from freetrain_parsl.protocol.messages import StartTask, TaskEnded
from freetrain_parsl.training.node_memory import NodeMemory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("crash", [True, False])
def test_a_task_is_run_again_until_its_slots_have_crashed_too_often(crash: bool) -> None:
    """It was run for ever, and ended all slots one after another."""
    registry = SlotRegistry(1)
    started: list[int] = []
    tasks = TaskQueue(registry, lambda _slot, message: started.append(message.task), max_restarts=2)
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


@pytest.mark.parametrize(("shared", "lent"), [(False, {"n"}), (True, {"n/1", "n/3"})])
def test_tasks_want_and_have_whole_nodes_or_slots_of_shared_ones(shared: bool, lent: set[str]) -> None:
    registry = SlotRegistry(4, share_nodes=shared)
    started: list[str] = []
    tasks = TaskQueue(registry, lambda slot, _message: started.append(slot), max_restarts=2)
    for number in range(5):
        tasks.submit(Task(number, b"function", Future()))
    assert tasks.demand(0.0) == TasksWaiting(0.0, 5 if shared else 2, frozenset())
    for number in range(4):
        slot = Slot(f"s{number}", "token", "n", "b", heard=0.0, lane=registry.free_lane("n", None))
        registry.slots[slot.name] = slot
        registry.completes(slot)
    tasks.lent = frozenset(lent)
    tasks.serve()
    assert started == (["s1", "s3"] if shared else ["s0", "s1", "s2", "s3"])
    assert tasks.demand(0.0) == TasksWaiting(0.0, 3 if shared else 1, frozenset(lent))


def test_a_task_that_calls_exit_fails_and_its_slot_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: queue.SimpleQueue[TaskEnded] = queue.SimpleQueue()
    monkeypatch.setattr(slot_module, "Channel", lambda *_, **__: SimpleNamespace(send=sent.put))
    monkeypatch.setattr(slot_module, "SignalSocket", lambda *_: None)
    slot = _Slot(
        SlotSettings(("127.0.0.1",), 1, None, 1.0, 10.0, 5.0),
        "token",
        Pulse(10.0),
        NodeMemory("n0", "b0", lambda: None),
    )
    slot._run_task(StartTask(3, pack_task(sys.exit, (4,), {})))
    ended = sent.get_nowait()
    assert (ended.task, ended.failed) == (3, True)
    error = error_in(ended.payload)
    assert isinstance(error, TrainingError)
    assert str(error) == "the app raised SystemExit: 4"


@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "partial call, as of a bash app"])
def test_a_task_finds_the_module_of_its_function_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """Nodes do not search the directory in which they start, but the one where the driver has found the module."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_module_of_a_task.py").write_text("def add(a, b):\n    return a + b\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    function = importlib.import_module("own_module_of_a_task").add
    payload = pack_task(partial(function, 1), (2,), {}) if wrapped else pack_task(function, (1, 2), {})
    (tmp_path / "payload").write_bytes(payload)
    script = """
import sys
from pathlib import Path
from parsl.executors.execute_task import execute_task
print(execute_task(Path(sys.argv[1]).read_bytes()))
"""
    command = [*script_command(script), str(tmp_path / "payload")]
    assert subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout == "3\n"
