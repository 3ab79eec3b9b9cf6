"""Processes started by the tests: as in a terminal, and found by a mark in their environment."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "FREETRAIN_TEST_MARK"


def hear_ctrl_c() -> None:
    """Restore SIGINT, which shells ignore for background jobs, such as these tests may be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Find the live processes that have inherited this mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and alive(process):
                yield process
        except psutil.Error:  # noqa: PERF203 - any process may end in between
            continue


def alive(process: psutil.Process) -> bool:
    """Return whether a process is running; zombies are not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def command_line(process: psutil.Process) -> str:
    """Return the command of a process; empty if it has ended in the meantime."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
