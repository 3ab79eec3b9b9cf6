"""One driver per run directory: a lock while it is alive, and checks by other processes whether it is.

The lock works on one host, and on shared file systems that propagate locks. Elsewhere, the driver's host and
heartbeat in the store are used.
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
from freetrain_parsl.storage.owned_files import open_own_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from freetrain_parsl.campaign.stored_run import DriverRecord, StoredRun

__all__ = ["BEAT", "DriverState", "driver_lock", "driver_state", "is_silent", "own_identity"]

BEAT = 2.0  # seconds between heartbeats, and between checks for requests
_SILENT = 60.0  # seconds without a heartbeat after which a driver on another host counts as dead
_SURE = 5 * BEAT  # seconds for which it is watched before another driver replaces it


class DriverState(str, Enum):
    """State of a driver; the value is shown to the user."""

    ALIVE = "runs"
    ENDED = "has ended cleanly"
    DEAD = "has died"
    NONE = "was never started"


def own_identity() -> tuple[str, int, int]:
    """Return host, process id and start of this process."""
    info = process_info(os.getpid())
    assert info is not None, "a process can inspect itself"
    return platform.node(), info.pid, info.started


def driver_state(driver: DriverRecord | None, clock: Callable[[], float] = time.time) -> DriverState:
    """Return whether a driver is alive: by its process on this host, by its heartbeat on another.

    Clocks of two hosts differ and may be stepped: a driver that is about to replace it uses `is_silent`.
    """
    if driver is None:
        return DriverState.NONE
    if driver.ended is not None:
        return DriverState.ENDED
    if driver.host == platform.node():
        return DriverState.ALIVE if is_running(driver.pid, driver.started) else DriverState.DEAD
    return DriverState.ALIVE if clock() - driver.heartbeat < _SILENT else DriverState.DEAD


def is_silent(
    store: StoredRun,
    *,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return whether a run has no live driver, regardless of clock differences between hosts.

    A driver on another host whose last heartbeat is old, or in the future, by this host's clock is watched: if it
    sends a heartbeat it is alive. If the last one is in the future, it is watched for the whole timeout.
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
        Another process holds the lock.
    """
    try:
        file = open_own_file(directory / "driver.lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise InvalidInput(f"{directory}: driver.lock cannot be opened: {error.strerror}") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                f"another driver, or 'freetrain clean', works in {directory}; see 'freetrain status {directory}'"
            ) from None
        except OSError:
            pass  # a file system without locks: the caller has checked the heartbeat
        yield
    finally:
        os.close(file)
