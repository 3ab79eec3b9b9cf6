"""The training jobs and ordinary tasks that were submitted and are not done.

Parsl has one thread that passes calls to executors, in order, and a call that waits for the results of others does not
reach an executor at all. All that is known of such a call is the record in its future.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from parsl.dataflow.futures import AppFuture
from parsl.dataflow.states import States

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.driver.plain_tasks import Task
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.jobs.request import SPECIFICATION_KEY, Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from parsl.dataflow.taskrecord import TaskRecord
    from parsl.executors.base import ParslExecutor

    from freetrain_parsl.executor.jobs.request import TrainingRequest

__all__ = ["Submissions"]


class Submissions:
    """The futures that the executor has returned and that are not done; may be used from any thread."""

    def __init__(self) -> None:
        self._requests: dict[Future[Any], TrainingRequest | None] = {}
        """The requests of training jobs; ``None`` for tasks."""
        self._trainings: dict[int, Future[Any]] = {}
        """Identity of a training job's request -> its future."""
        self._cancelled: dict[int, TrainingRequest] = {}
        """The requests of training jobs that were cancelled and that Parsl may still launch, by identity."""
        self._names: set[str] = set()
        self._tasks = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return their number."""
        return len(self._requests)

    def was_cancelled(self, request: TrainingRequest) -> bool:
        """Return whether a training job was cancelled: Parsl launches it only now, or again."""
        return id(request) in self._cancelled

    def add_task(self, payload: bytes) -> Task:
        """Add an ordinary task; `payload` is its serialized call."""
        with self._lock:
            self._tasks += 1
            task = Task(self._tasks, payload, Future())
            self._requests[task.future] = None
        task.future.add_done_callback(self._forget)
        return task

    def add_training(self, request: TrainingRequest, payload: bytes) -> Training:
        """Add a training job; `payload` is its serialized call.

        Raises
        ------
        InvalidApp
            A training job of that name is not done.
        """
        with self._lock:
            if request.name in self._names:
                raise InvalidApp(f"a training job named {request.name!r} is running; give this one another name")
            self._names.add(request.name)
            training = Training(request, payload, Future())
            self._requests[training.future] = request
            self._trainings[id(request)] = training.future
        training.future.add_done_callback(self._forget)
        return training

    def cancel(self, future: Future[Any], executor: ParslExecutor, end: Callable[[Future[Any]], None]) -> bool:
        """Cancel the training job with this future; see `FreeTrainExecutor.cancel`.

        Parsl may launch it only later, or again, until its call is done. If it has been added and is not done, `end` is
        called with the executor's own future.
        """
        request = _request_of(future, executor) if isinstance(future, AppFuture) else self._requests.get(future)
        if request is None:
            return False
        with self._lock:
            self._cancelled[id(request)] = request
            own = self._trainings.get(id(request))
        if own is not None:
            end(own)
        if not isinstance(future, AppFuture):
            return True
        future.add_done_callback(lambda _: self._cancelled.pop(id(request), None))
        return _call_off(future)

    def fail_all(self, error: Exception) -> None:
        """Fail all futures that are not done."""
        with self._lock:
            futures = list(self._requests)
        for future in futures:
            with suppress(InvalidStateError):  # it has been resolved meanwhile
                future.set_exception(unshared(error))

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            request = self._requests.pop(future, None)
            if request is not None:
                self._names.discard(request.name)
                self._trainings.pop(id(request), None)


def _request_of(future: AppFuture, executor: ParslExecutor) -> TrainingRequest | None:
    """Return the request of a training app's call; ``None`` if it is no training job, or another executor's."""
    record = future.task_record
    if record["dfk"].executors.get(record["executor"]) is not executor:
        return None
    request: TrainingRequest | None = record["resource_specification"].get(SPECIFICATION_KEY)
    return request


def _call_off(future: AppFuture) -> bool:
    """Let Parsl launch a call soon that still waits for its arguments, without them; the executor is to refuse it.

    Return false if the call is never launched, since Parsl was cleaned up.
    """
    record = future.task_record
    record["memoize"] = False  # else a later call would get the refusal from Parsl's cache
    if not _waits(record):
        return True
    with record["task_launch_lock"]:  # held for long only while the call is being launched
        if not _waits(record):
            return True
        record["args"], record["kwargs"], record["depends"] = (), {}, []
    try:
        record["dfk"].launch_if_ready(record)
    except RuntimeError:  # Parsl's queue is closed
        return False
    return True


def _waits(record: TaskRecord) -> bool:
    """Return whether a call waits for its arguments; else it was launched, or is in Parsl's queue."""
    return record["status"] is States.pending and not all(one.done() for one in record["depends"])
