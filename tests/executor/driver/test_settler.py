"""Code of the user's that blocks while a future is settled does not stop the driver."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from parsl.serialize import serialize

from freetrain_parsl.executor.driver.plain_tasks import Task, TaskQueue
from freetrain_parsl.executor.driver.settler import Settler
from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
from freetrain_parsl.protocol.messages import TaskEnded


def test_a_callback_that_blocks_holds_up_later_futures_and_nobody_else() -> None:
    """It held up the control loop, and the slots gave the driver up."""
    settler = Settler()
    tasks = TaskQueue(SlotRegistry(1), lambda *_: None, 3, settler.post)
    futures: list[Future[Any]] = [Future(), Future()]
    goes_on = threading.Event()
    futures[0].add_done_callback(lambda _: goes_on.wait(30))
    for number, future in enumerate(futures):
        tasks.submit(Task(number, b"function", future))
        slot = Slot(f"s{number}", "token", "n", "b", heard=0.0, busy=number)
        tasks.on_ended(slot, TaskEnded(number, failed=False, payload=serialize(number)))
    assert futures[0].result(30) == 0
    assert not futures[1].done()
    goes_on.set()
    settler.close(30)
    assert futures[1].result(0) == 1


def test_the_end_does_not_wait_for_a_callback_for_ever() -> None:
    settler = Settler()
    goes_on = threading.Event()
    settler.post(lambda: goes_on.wait(30) and None)
    settler.close(0.01)
    goes_on.set()
