"""The batch system's signals, for a thread of a slot other than the main one.

Python runs signal handlers in the main thread, between two bytecodes: not while the main thread is in a call that does
not return, such as a collective whose peer is gone or a write to a hanging file system, and at any place of the code,
where taking a lock may deadlock. The number of a signal is written to a socket in the moment in which it arrives.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import FrameType

__all__ = ["SignalSocket"]


class SignalSocket:
    """A descriptor that becomes readable when one of some signals arrives.

    Parameters
    ----------
    numbers
        The signals.
    on_signal
        Called by `handle` with each signal that has arrived.
    """

    def __init__(self, numbers: Collection[signal.Signals], on_signal: Callable[[signal.Signals], None]) -> None:
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._forking = threading.local()  # the signal mask of a thread that forks a process
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._writer.setblocking(False)  # noqa: FBT003 - the same

    def install(self) -> None:
        """Receive the signals from now on; called once, in the main thread."""
        for number in self._numbers:
            signal.signal(number, self._write)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Blocked while a process forks, so that the new one has received none when its actions are restored.
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._restore)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def handle(self) -> None:
        """Handle the signals that have arrived since the last call; one that has arrived repeatedly counts once."""
        arrived: set[int] = set()
        with suppress(BlockingIOError):
            while data := self._reader.recv(4096):
                arrived.update(data)
        for number in self._numbers:
            if number in arrived:
                self._on_signal(number)

    def _write(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's own signature
        """Repeat what `signal.set_wakeup_fd` does: user code, such as an event loop, may have replaced the socket."""
        with suppress(BlockingIOError):  # unread signals fill the socket
            self._writer.send(bytes((number,)))

    def _block(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _restore(self) -> None:
        """Give a forked process, such as a data loader's, the default actions: its signals are not the slot's."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            if signal.getsignal(number) == self._write:
                signal.signal(number, signal.SIG_DFL)
        self._unblock()
