"""Settling futures in a thread, because this runs user code, which may block."""

from __future__ import annotations

import copy
import queue
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Settle", "Settler", "settle_at_once", "unshared"]

Settle: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Calls a function that settles a future, now or later."""


def settle_at_once(settle: Callable[[], None]) -> None:
    """Settle a future in this thread, see `Settle`."""
    settle()


class Settler:
    """Settles futures in order, in a thread of its own.

    Results are unpickled and callbacks of futures are called there. In the control loop's thread, a callback that takes
    a minute would end all slots, whose heartbeats would not be answered in that time.
    """

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="freetrain-futures", daemon=True)
        self._started = False

    def post(self, settle: Callable[[], None]) -> None:
        """Settle a future soon; `settle` must not raise exceptions. Call it from one thread, before `close`."""
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


def unshared(error: Exception) -> Exception:
    """Return a copy of an exception for one future of several that fail for the same reason.

    Each time an exception is raised, as by ``future.result()``, its traceback becomes longer: with one object for ten
    thousand futures, Parsl would write tracebacks of megabytes to its log. An exception that cannot be copied is
    returned itself.
    """
    try:
        own = copy.copy(error)
    except Exception:  # noqa: BLE001 - Parsl's and other packages' exceptions have constructors of their own
        return error
    if type(own) is not type(error):
        return error
    own.__cause__, own.__suppress_context__ = error.__cause__, error.__suppress_context__
    return own
