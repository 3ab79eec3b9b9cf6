"""A wake-up for threads that wait in a `zmq.Poller`."""

from __future__ import annotations

import socket

__all__ = ["Waker"]


class Waker:
    """Lets other threads interrupt a thread that waits in a `zmq.Poller`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._writer.setblocking(False)  # noqa: FBT003 - the same

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Interrupt the wait; cheap to repeat."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # enough wake-ups are pending already
        except OSError:
            pass  # closed: no thread waits any more

    def clear(self) -> None:
        """Discard the pending wake-ups."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
