"""Cleanup at the exit of the driver's process: except after SIGKILL, this executor's jobs are cancelled first.

SIGTERM and SIGHUP end Python without cleanup, and at exit Parsl only warns about a kernel that was not cleaned up.
"""

from __future__ import annotations

import atexit
import signal
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["OrderlyExit"]


class OrderlyExit:
    """Calls `end`, an idempotent cleanup, when the process exits; signals without a handler become a normal exit."""

    _SIGNALS = (signal.SIGTERM, signal.SIGHUP)

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self._handled: list[signal.Signals] = []

    def arm(self) -> None:
        """Install the exit hook, and, in the main thread, the signal handlers."""
        atexit.register(self._end)
        if threading.current_thread() is threading.main_thread():
            self._handled = [number for number in self._SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            for number in self._handled:
                signal.signal(number, _leave)

    def disarm(self) -> None:
        """Remove the exit hook, and those signal handlers that are still installed."""
        atexit.unregister(self._end)
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                if signal.getsignal(number) is _leave:
                    signal.signal(number, signal.SIG_DFL)
            self._handled = []


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - Python's own signature
    raise SystemExit(128 + number)
