"""One piece of work at a time beside the training."""

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
    """How a piece of work ended.

    Parameters
    ----------
    value
        What it returned; ``None`` if it failed.
    error
        Why it failed.
    processor_seconds
        Time that its thread took from the processors.
    """

    value: T | None
    error: Exception | None
    processor_seconds: float


class Background(Generic[T]):
    """Runs a function in a thread; the interpreter waits for it when it exits, so that nothing is cut off."""

    def __init__(self) -> None:
        self._running: Future[Done[T]] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work whose end has not been taken."""
        return self._running is not None

    @property
    def done(self) -> bool:
        """Whether there is work that has ended, and whose end has not been taken."""
        return self._running is not None and self._running.done()

    def start(self, work: Callable[[], T]) -> None:
        """Begin a piece of work; the one before must have been taken."""
        assert self._running is None, "never two at a time"
        self._running = Future()
        threading.Thread(target=_run, args=(work, self._running), name="freetrain-checkpoint").start()

    def take(self, *, wait: bool) -> Done[T] | None:
        """Return how the work ended; ``None`` if there is none, or it is not done and `wait` is false."""
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
    except Exception as error:  # noqa: BLE001 - it is raised where the training can see it
        problem = error
    outcome.set_result(Done(value, problem, time.thread_time() - begun))
