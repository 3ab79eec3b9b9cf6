"""One background task at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """The outcome of a background task.

    Parameters
    ----------
    value
        Its return value; ``None`` if it failed.
    error
        Its exception, if it failed.
    processor_seconds
        CPU time of its thread.
    """

    value: T | None
    error: Exception | None
    processor_seconds: float


class Background(Generic[T]):
    """Runs a function in a thread; the interpreter waits for it at exit, so that a write is not cut off."""

    def __init__(self) -> None:
        self._running: Future[Done[T]] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is a task whose outcome has not been taken."""
        return self._running is not None

    @property
    def done(self) -> bool:
        """Whether there is a completed task whose outcome has not been taken."""
        return self._running is not None and self._running.done()

    def start(self, work: Callable[[], T]) -> None:
        """Start a task; the outcome of the previous one must have been taken."""
        assert self._running is None, "one task at a time"
        self._running = Future()
        threading.Thread(target=_run, args=(work, self._running), name="freetrain-checkpoint").start()

    def take(self, *, wait: bool) -> Done[T] | None:
        """Return the outcome of the task; ``None`` if there is no task, or it is not done and `wait` is false."""
        if self._running is None or (not wait and not self._running.done()):
            return None
        done = self._running.result()
        self._running = None
        return done


def _run(work: Callable[[], T], outcome: Future[Done[T]]) -> None:
    begun = time.thread_time()
    value, problem = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - it is reported to the training
        problem = error
    outcome.set_result(Done(value, problem, time.thread_time() - begun))
