"""Faults of processes: killed, stopped, slowed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PERIOD = timedelta(milliseconds=100)


def kill(pid: int) -> None:
    """End a process at once, as the kernel does when memory runs out.

    Raises
    ------
    ProcessLookupError
        It has ended already.
    UsageError
        The id stands for several processes, or for the first one of the machine.
    """
    _signal(pid, signal.SIGKILL)


def kill_all(pids: Iterable[int]) -> None:
    """End several processes at once, as when their node loses power; those that have ended already are passed over."""
    for pid in tuple(pids):
        with suppress(ProcessLookupError):
            kill(pid)


def stop(pid: int) -> None:
    """Make a process hang until `resume`; its connections stay open, and silent.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`.
    """
    _signal(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a stopped process go on.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`.
    """
    _signal(pid, signal.SIGCONT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Make a process hang inside the block; it may end meanwhile.

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
    """Let a process run only part of the time inside the block; it may end meanwhile.

    Parameters
    ----------
    pid
        The process.
    share
        Part of the time in which it runs, between 0 and 1, both excluded.
    period
        How long it takes to run and hang once.

    Raises
    ------
    ProcessLookupError, UsageError
        As `kill`; or the share is out of range.
    """
    if not 0 < share < 1:
        raise UsageError(f"slow: share must lie between 0 and 1, got {share}")
    _check(pid)
    process = os.pidfd_open(pid)  # not the number: the thread would hit whoever gets it next
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
        raise UsageError(f"process id {pid} does not stand for one process that can be harmed")
