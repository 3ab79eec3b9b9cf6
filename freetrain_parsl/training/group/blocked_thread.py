"""Detects from another thread that a thread is blocked in a collective called by user code or a model.

The session marks its own waits for other processes (`ControlMailbox.waiting`). A sharded model (FSDP2) communicates
inside its forward and backward passes, and user code may call ``torch.distributed`` itself; such calls have to be
detected from outside. A thread is considered blocked if its innermost Python frame is the same, at the same instruction
and in ``torch.distributed``, at each observation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from freetrain_parsl.training.mailbox import Clock

_COLLECTIVES = str(Path(dist.__file__).parent)
_NOT_COLLECTIVES = str(Path(dist.__file__).parent / "checkpoint")  # may block on file I/O


class BlockedThread:
    """Watches one thread; call `seconds` about once a second from another thread.

    Parameters
    ----------
    thread
        Its identifier, see ``threading.get_ident``.
    clock
        Monotonic clock, in seconds.
    """

    def __init__(self, thread: int, clock: Clock) -> None:
        self._thread = thread
        self._clock = clock
        self._place: tuple[int, int] | None = None
        self._since = 0.0

    def seconds(self) -> float:
        """Return for how long the thread has been observed to be blocked in the same call; 0.0 if it is not."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - documented by Python for this use
        place = None
        file = "" if frame is None else frame.f_code.co_filename
        if frame is not None and file.startswith(_COLLECTIVES) and not file.startswith(_NOT_COLLECTIVES):
            place = id(frame), frame.f_lasti
        if place is None or place != self._place:
            self._place, self._since = place, self._clock()
            return 0.0
        return self._clock() - self._since
