"""One driver a run directory: a lock while it lives, and how others tell whether it lives.

The lock holds on one host, and on shared file systems that pass locks on. Where they do not, the driver's host and
heartbeat in the store tell.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.processes import is_running, process_info
from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from freetrain_parsl.campaign.store import DriverRecord, RunStore

__all__ = ["BEAT", "DriverState", "driver_lock", "driver_state", "is_silent", "own_identity"]

BEAT = 2.0  # seconds between signs of life, and looks for requests
_SILENT = 60.0  # seconds without one after which a driver on another host counts as dead
_SURE = 5 * BEAT  # seconds for which it is watched before somebody takes its place


class DriverState(str, Enum):
    """What became of a driver; the value is the sentence that people read."""

    ALIVE = "runs"
    ENDED = "has ended in order"
    DEAD = "has died"
    NONE = "was never there"


def own_identity() -> tuple[str, int, int]:
    """Return host, process id and start of this process."""
    info = process_info(os.getpid())
    assert info is not None, "a process sees itself"
    return platform.node(), info.pid, info.started


def driver_state(driver: DriverRecord | None, clock: Callable[[], float] = time.time) -> DriverState:
    """Tell whether a driver lives: by its process on this host, by its heartbeat on another.

    The clocks of two hosts differ, and are stepped: who is about to take its place asks `is_silent`.
    """
    if driver is None:
        return DriverState.NONE
    if driver.ended is not None:
        return DriverState.ENDED
    if driver.host == platform.node():
        return DriverState.ALIVE if is_running(driver.pid, driver.started) else DriverState.DEAD
    return DriverState.ALIVE if clock() - driver.heartbeat < _SILENT else DriverState.DEAD


def is_silent(
    store: RunStore,
    *,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Tell whether nobody drives a run, whatever the clocks of both hosts show.

    A driver on another host whose last heartbeat is old, or in the future, by this host's clock is watched: if it
    gives a sign of life it lives. One of the future must be silent for as long as counts as dead.
    """
    driver = store.last_driver()
    state = driver_state(driver, clock)
    if driver is None or driver.ended is not None or driver.host == platform.node():
        return state is not DriverState.ALIVE
    age = clock() - driver.heartbeat
    if 0 <= age < _SILENT:
        return False
    end = monotonic() + (_SURE if age >= 0 else _SILENT)
    while monotonic() < end:
        sleep(BEAT / 2)
        if store.last_driver() != driver:
            return False
    return True


@contextmanager
def driver_lock(directory: Path) -> Iterator[None]:
    """Hold the run directory for this process.

    Raises
    ------
    InvalidInput
        Another process holds it.
    """
    file = os.open(directory / "driver.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another driver has {directory}; 'freetrain status {directory}' tells which") from None
        except OSError:
            pass  # a file system without locks: the caller has looked at the heartbeat
        yield
    finally:
        os.close(file)
