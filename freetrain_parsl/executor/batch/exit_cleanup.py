"""The end of the driver's process: however it comes, short of SIGKILL, our jobs are ended first.

Python dies of SIGTERM and SIGHUP without a word, and Parsl only warns at exit of a kernel that was not cleaned up.
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
    """Calls `end` at the process's exit, and makes an exit of the signals that nobody else handles.

    Parameters
    ----------
    end
        Must be harmless if all is ended already.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGHUP)

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self._handled: list[signal.Signals] = []

    def arm(self) -> None:
        """Begin to watch over the exit; signal handlers can be had from the main thread only."""
        atexit.register(self._end)
        if threading.current_thread() is threading.main_thread():
            self._handled = [number for number in self._SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            for number in self._handled:
                signal.signal(number, _leave)

    def disarm(self) -> None:
        """Leave the exit, and the signals that are still ours, as they were."""
        atexit.unregister(self._end)
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                if signal.getsignal(number) is _leave:
                    signal.signal(number, signal.SIG_DFL)
            self._handled = []


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - Python's own signature
    raise SystemExit(128 + number)
