"""Ordinary Parsl tasks: each runs in one slot that the planner lends for tasks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import TooManyRestarts
from freetrain_parsl.executor.driver.settler import settle_at_once
from freetrain_parsl.executor.payloads.payloads import error_in, settle_with_error, settle_with_value
from freetrain_parsl.planning import events as ev
from freetrain_parsl.protocol.messages import StartTask

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from freetrain_parsl.executor.driver.settler import Settle
    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.protocol.messages import TaskEnded

__all__ = ["Task", "TaskQueue"]


@dataclass
class Task:
    """An ordinary Parsl task; it is run again in another slot if its slot fails."""

    number: int
    payload: bytes
    future: Future[Any]
    crashes: int = 0
    """Number of its slots that failed, on nodes that were not taken."""


class TaskQueue:
    """A first-in, first-out queue of ordinary tasks; owned by the control loop's thread.

    A task is run again after up to `max_restarts` crashes.
    """

    def __init__(
        self,
        registry: SlotRegistry,
        send: Callable[[str, StartTask], object],
        max_restarts: int,
        settle: Settle = settle_at_once,
        values: ValueFiles | None = None,
    ) -> None:
        self._registry = registry
        self._send = send
        self._max_restarts = max_restarts
        self._settle = settle
        self._values = values
        self._tasks: dict[int, Task] = {}
        self._queue: deque[int] = deque()
        self.lent: frozenset[str] = frozenset()
        """The units that the planner lends."""

    @property
    def waiting(self) -> bool:
        """Whether any task is pending or running."""
        return bool(self._tasks)

    def submit(self, task: Task) -> None:
        """Queue a task."""
        self._tasks[task.number] = task
        self._queue.append(task.number)

    def serve(self) -> None:
        """Start queued tasks in the free slots of the lent units."""
        for slot in self._registry.free_slots(self.lent):
            if not self._queue:
                return
            slot.busy = self._queue.popleft()
            self._send(slot.name, StartTask(slot.busy, self._tasks[slot.busy].payload))

    def on_ended(self, slot: Slot, message: TaskEnded) -> None:
        """Resolve a task's future; ignore an outdated message about a task that is not the slot's current one."""
        if slot.busy != message.task:
            return
        slot.busy = None
        task = self._tasks.pop(message.task, None)
        if task is None or task.future.done():
            return
        if message.failed:
            self._settle(lambda: settle_with_error(task.future, error_in(message.payload)))
        else:
            value = message.payload if message.stored is None else message.stored
            self._settle(partial(settle_with_value, task.future, value, self._values))

    def on_lost(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Put the task of a failed slot back at the front of the queue; fail it if that was too often a `crash`."""
        if not isinstance(slot.busy, int) or (task := self._tasks.get(slot.busy)) is None:
            return
        task.crashes += crash
        if task.crashes <= self._max_restarts:
            self._queue.appendleft(task.number)
            return
        del self._tasks[task.number]
        error = TooManyRestarts(
            f"a task failed {task.crashes} times together with its slot, the last time because of: {reason}"
        )
        self._settle(partial(settle_with_error, task.future, error))

    def demand(self, now: float) -> ev.TasksWaiting:
        """Return an event for the planner: how many units tasks use and could use."""
        slots = self._registry.slots.values() if self._tasks else ()
        busy = frozenset(slot.place for slot in slots if isinstance(slot.busy, int))
        return ev.TasksWaiting(now, -(-len(self._queue) // self._registry.slots_per_unit), busy)
