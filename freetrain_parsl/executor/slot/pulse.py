"""What a slot's process shows its place: that the thread which sends its heartbeats still runs.

The driver drops a slot without heartbeats and tells it to end, but a process in a long C call that keeps Python's
global interpreter lock does not read the command, nor does one whose user code has broken the thread. It would keep its
worker place from all other jobs.
"""

from __future__ import annotations

import mmap
from typing import Final

__all__ = ["Pulse"]

_SIZE: Final = 8  # bytes of the counter
_LATER: Final = 5.0  # seconds after the driver has given the process up: it may still read the command to end


class Pulse:
    """A counter in memory that a place shares with the processes that it forks.

    Parameters
    ----------
    heartbeat_timeout
        Seconds without a heartbeat after which the driver drops a slot.
    """

    def __init__(self, heartbeat_timeout: float) -> None:
        self.patience = heartbeat_timeout + _LATER
        """Seconds without a beat after which the process is ended."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def beat(self) -> None:
        """Show that this process is alive."""
        self._memory[:_SIZE] = ((self.count() + 1) % (1 << 64)).to_bytes(_SIZE, "little")

    def count(self) -> int:
        """Return the number of beats so far, of all processes."""
        return int.from_bytes(self._memory[:_SIZE], "little")
