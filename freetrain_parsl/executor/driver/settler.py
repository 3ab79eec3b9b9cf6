"""A thread that settles futures: this runs user code, which may block."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Settle", "Settler", "settle_at_once"]

Settle: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Calls a function that settles a future, now or later."""


def settle_at_once(settle: Callable[[], None]) -> None:
    """Settle a future in this thread, see `Settle`."""
    settle()


class Settler:
    """Settles futures in order, in a thread of its own.

    Results are unpickled and callbacks of futures are called there. In the control loop's thread, a callback that takes
    a minute would end all slots, whose heartbeats would not be answered meanwhile.
    """

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="freetrain-futures", daemon=True)
        self._started = False

    def post(self, settle: Callable[[], None]) -> None:
        """Settle a future soon; `settle` must not raise exceptions. For one thread, until `close`."""
        self._actions.put(settle)
        if not self._started:
            self._started = True
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Settle what was posted, and end the thread; give up after `timeout` seconds."""
        self._actions.put(None)
        if self._started:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (settle := self._actions.get()) is not None:
            settle()
