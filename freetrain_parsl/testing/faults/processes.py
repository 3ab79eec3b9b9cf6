"""Faults of processes: killed, stopped, slowed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PERIOD = timedelta(milliseconds=100)


def is_alive(pid: int) -> bool:
    """Return whether a process exists; zombies do not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def kill(pid: int) -> None:
    """Kill a process, as the kernel does when memory runs out.

    Raises
    ------
    ProcessLookupError
        It has already ended.
    UsageError
        The id denotes several processes, or the init process.
    """
    _signal(pid, signal.SIGKILL)


def kill_all(pids: Iterable[int]) -> None:
    """Kill several processes at once, as when their node loses power; ended ones are skipped."""
    for pid in tuple(pids):
        with suppress(ProcessLookupError):
            kill(pid)


def stop(pid: int) -> None:
    """Make a process hang until `resume`; its connections stay open without traffic.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`.
    """
    _signal(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Continue a stopped process.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`.
    """
    _signal(pid, signal.SIGCONT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Make a process hang inside the block; it may end in the meantime.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`.
    """
    stop(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resume(pid)


@contextmanager
def slow(pid: int, share: float, period: timedelta = _PERIOD) -> Iterator[None]:
    """Let a process run only part of the time inside the block; it may end in the meantime.

    Parameters
    ----------
    pid
        The process.
    share
        Fraction of the time in which it runs, between 0 and 1, both excluded.
    period
        Duration of one cycle of running and hanging.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`; or the share is out of range.
    """
    if not 0 < share < 1:
        raise UsageError(f"slow: share must lie between 0 and 1, got {share}")
    _check(pid)
    process = os.pidfd_open(pid)  # not the number: it may be reused by another process
    over = threading.Event()
    runs = share * period.total_seconds()

    def alternate() -> None:
        try:
            while not over.is_set():
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                over.wait(period.total_seconds() - runs)
                signal.pidfd_send_signal(process, signal.SIGCONT)
                over.wait(runs)
        except ProcessLookupError:
            pass  # it has ended

    thread = threading.Thread(target=alternate, name=f"slow-{pid}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(process)


def _signal(pid: int, number: signal.Signals) -> None:
    _check(pid)
    os.kill(pid, number)


def _check(pid: int) -> None:
    if pid <= 1:
        raise UsageError(f"process id {pid} does not denote a single process that may be harmed")
