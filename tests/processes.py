"""Processes that the tests start: as a terminal would start them, and found again by a mark in their environment."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "FREETRAIN_TEST_MARK"


def hear_ctrl_c() -> None:
    """Undo what a shell does to background jobs, of which these tests may be one: they do not hear SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Find the living processes that have inherited this mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and alive(process):
                yield process
        except psutil.Error:  # noqa: PERF203 - each process may vanish by itself
            continue


def alive(process: psutil.Process) -> bool:
    """Tell whether a process runs; a zombie does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def command_line(process: psutil.Process) -> str:
    """Get the command of a process; nothing if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
