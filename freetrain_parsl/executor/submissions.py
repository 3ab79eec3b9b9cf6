"""The trainings and ordinary tasks that were submitted and are not done."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidTrainer
from freetrain_parsl.executor.control.plain_tasks import Task
from freetrain_parsl.executor.trainings import Training

if TYPE_CHECKING:
    from freetrain_parsl.executor.trainings import TrainingRequest

__all__ = ["Submissions"]


class Submissions:
    """The futures that the executor has returned and that are not done; may be used from any thread."""

    def __init__(self) -> None:
        self._requests: dict[Future[Any], TrainingRequest | None] = {}
        """The requests of trainings; ``None`` for tasks."""
        self._cancelled: list[TrainingRequest] = []
        self._names: set[str] = set()
        self._tasks = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return their number."""
        return len(self._requests)

    def was_cancelled(self, request: TrainingRequest) -> bool:
        """Return whether a training was cancelled: the request is now one of Parsl's retries."""
        return any(request is one for one in self._cancelled)

    def add_task(self, payload: bytes) -> Task:
        """Add an ordinary task; `payload` is its serialized call."""
        with self._lock:
            self._tasks += 1
            task = Task(self._tasks, payload, Future())
            self._requests[task.future] = None
        task.future.add_done_callback(self._forget)
        return task

    def add_training(self, request: TrainingRequest, payload: bytes) -> Training:
        """Add a training; `payload` is its serialized call.

        Raises
        ------
        InvalidTrainer
            A training of that name is not done.
        """
        with self._lock:
            if request.name in self._names:
                raise InvalidTrainer(f"a training named {request.name!r} is running; give this one another name")
            self._names.add(request.name)
            training = Training(request, payload, Future())
            self._requests[training.future] = request
        training.future.add_done_callback(self._forget)
        return training

    def cancel(self, future: Future[Any]) -> Future[Any] | None:
        """Note that a training is being cancelled; return its future, or ``None`` if there is none that is not done.

        Parameters
        ----------
        future
            Its future, or the `AppFuture` that wraps it.
        """
        record = getattr(future, "task_record", None)  # of an AppFuture
        own = future if record is None else record.get("exec_fu")
        with self._lock:
            request = self._requests.get(own) if own is not None else None
            if request is None or own.done():
                return None
            self._cancelled.append(request)
        return own

    def fail_all(self, error: Exception) -> None:
        """Fail all futures that are not done."""
        with self._lock:
            futures = list(self._requests)
        for future in futures:
            with suppress(InvalidStateError):  # it has been resolved meanwhile
                future.set_exception(error)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            request = self._requests.pop(future, None)
            if request is not None:
                self._names.discard(request.name)
