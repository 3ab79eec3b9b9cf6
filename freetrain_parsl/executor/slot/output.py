"""What a process prints while it trains: taken from its file descriptors, and passed on once a second, bounded.

Standard output and standard error are one file in memory meanwhile. So the output of libraries and of other processes
that the training job starts is included, in order; writing to it never blocks, as it would to a pipe whose reader waits
for the interpreter's lock; and the training job's speed does not depend on what becomes of its output.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Allowance", "OutputCapture", "flush_streams"]

_PERIOD: Final = 1.0  # seconds between two looks at the output
_RATE: Final = 64 << 10  # bytes per second that are passed on in the long run
_BURST: Final = 1 << 20  # bytes that are passed on at once
_LONGEST_LINE: Final = 16 << 10  # bytes
_LONGEST_MESSAGE: Final = 256 << 10  # bytes
_PUNCH: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_STREAMS: Final = (1, 2)


def flush_streams() -> None:
    """Write what the user's code has printed; a process that ends by `os._exit` loses it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a full disk; the user's code closed it, or removed it
            stream.flush()


class Allowance:
    """How many bytes of output are passed on, with at most a `burst` at once and `rate` bytes per second then; pure."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, amount: int, now: float) -> int:
        """Return how many of `amount` bytes are passed on."""
        self._left = min(self._burst, self._left + self._rate * max(0.0, now - self._at))
        self._at = now
        granted = min(amount, int(self._left))
        self._left -= granted
        return granted


class OutputCapture:
    """Takes this process's output for the duration of a ``with`` block.

    Parameters
    ----------
    deliver
        Called with an owner and lines of its output (UTF-8, each with its end), from this object's thread and from
        those that call `flush`; must not block.
    owner
        To whom the output belongs at first.
    """

    def __init__(
        self, deliver: Callable[[str, bytes], None], owner: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._deliver = deliver
        self._owner = owner
        self._clock = clock
        self._allowance = Allowance(_RATE, _BURST, clock())
        self._lock = threading.Lock()  # of the next five
        self._open = True
        self._spans: list[tuple[int, str]] = []  # where the output of an owner ends
        self._marked = 0  # where the last one of them ends
        self._begin = 0  # what precedes has been passed on
        self._carry: dict[str, _Carry] = {}
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        flush_streams()
        self._file = os.memfd_create("freetrain-output", os.MFD_CLOEXEC)
        # Appending: other processes may open it again, as /dev/stdout.
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_APPEND)
        self._before = [os.dup(descriptor) for descriptor in _STREAMS]
        for descriptor in _STREAMS:
            os.dup2(self._file, descriptor)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # as in flush_streams
                stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        self._thread = threading.Thread(target=self._run, name="freetrain-output", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        flush_streams()
        for copy, descriptor in zip(self._before, _STREAMS, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        self._closing.set()
        self._thread.join()
        self.flush(last=True)
        with self._lock:
            self._open = False
            os.close(self._file)

    def attribute(self, owner: str) -> None:
        """State whose output follows; called by the thread that prints."""
        if owner == self._owner:
            return
        flush_streams()
        end = os.fstat(self._file).st_size
        if end != self._marked:
            with self._lock:
                self._spans.append((end, self._owner))
                self._marked = end
        self._owner = owner

    def flush(self, *, last: bool = False) -> None:
        """Pass on the output so far; incomplete lines only if it is the `last`. May be called from any thread."""
        with self._lock:
            if not self._open:
                return
            end = os.fstat(self._file).st_size
            spans, self._spans = [*self._spans, (end, self._owner)], []
            if end < self._begin:  # a process that the training job has started has emptied /dev/stdout
                self._begin, spans = 0, [(end, self._owner)]
            self._marked = end
            output: dict[str, bytes] = {}
            for stop, owner in spans:
                if stop > self._begin:
                    output[owner] = output.get(owner, b"") + self._read(self._begin, stop)
                    self._begin = stop
            _give_back(self._file, end)
            for owner in {**self._carry, **output} if last else output:
                self._pass_on(owner, self._carry.pop(owner, _Carry()), output.get(owner, b""), last=last)

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD):
            self.flush()

    def _read(self, begin: int, end: int) -> bytes:
        """Return the output in a part of the file: all of it, or its first and last lines."""
        granted = self._allowance.take(end - begin, self._clock())
        if granted == end - begin:
            return os.pread(self._file, granted, begin)
        head = os.pread(self._file, granted // 2, begin)
        tail = os.pread(self._file, granted // 2, end - granted // 2)
        head, tail = head[: head.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :]
        return head + _gap(end - begin - len(head) - len(tail)) + tail

    def _pass_on(self, owner: str, begun: _Carry, output: bytes, *, last: bool) -> None:
        *lines, rest = (begun.line + output).split(b"\n")
        if last and rest:
            lines, rest = [*lines, rest], b""
        dropped = begun.dropped  # of the first line
        message: list[bytes] = []
        length = 0
        for line in lines:
            message.append(_cut(line, dropped) + b"\n")
            length += len(message[-1])
            dropped = 0
            if length >= _LONGEST_MESSAGE:
                self._deliver(owner, b"".join(message))
                message, length = [], 0
        if message:
            self._deliver(owner, b"".join(message))
        if rest:
            self._carry[owner] = _begun(rest, dropped)


class _Carry(NamedTuple):
    """A line without its end so far: what is kept of it, and how many bytes followed."""

    line: bytes = b""
    dropped: int = 0


def _begun(line: bytes, dropped: int) -> _Carry:
    """Return what to keep of a line without its end; `dropped` bytes of it were not kept earlier."""
    end = b"\r" if line.endswith(b"\r") else b""  # what follows overwrites the line, or ends it
    _, overwritten, shown = line.rstrip(b"\r").rpartition(b"\r")
    dropped = 0 if overwritten else dropped
    return _Carry(shown[:_LONGEST_LINE] + end, dropped + max(0, len(shown) - _LONGEST_LINE))


def _cut(line: bytes, dropped: int = 0) -> bytes:
    """Return what a terminal would show of a line at its end, and of a long one the beginning."""
    kept, dropped = _begun(line.rstrip(b"\r"), dropped)  # progress bars overwrite their line
    return kept + f" … {dropped} bytes left out".encode() if dropped else kept


def _gap(size: int) -> bytes:
    return f"… {size} bytes left out: more than {_RATE >> 10} KiB per second …\n".encode()


def _give_back(file: int, end: int) -> None:
    """Free the memory of the file before `end`: its size grows, its memory does not."""
    if end:
        _fallocate(file, _PUNCH, ctypes.c_int64(0), ctypes.c_int64(end))  # best effort


_fallocate: Final = ctypes.CDLL(None).fallocate
