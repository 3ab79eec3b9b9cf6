"""Whether this driver still drives its run: another one may have replaced it while its process was suspended."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.errors import DriverSuperseded
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DriverFence"]

Clocks: TypeAlias = "Callable[[], tuple[float, ...]]"

_LEASE = 5.0  # seconds after a heartbeat in which no other driver begins: it first watches this one for 10 s
_RETRY = 2.0  # seconds between queries to a store that does not answer


def _clocks() -> tuple[float, float]:
    """Return a clock that continues during a suspension, and the wall clock, which is set after a pause of a VM."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), time.time()


class DriverFence:
    """Checks whether a driver may still act. Its methods can be called from any thread.

    Without a store to ask, as in a script, a driver may always act. `ask` may block, and raises `DriverSuperseded` if
    another driver has begun. After a jump of any of the `clocks`, the process may have been suspended.
    """

    def __init__(self, ask: Callable[[], None] | None = None, clocks: Clocks = _clocks) -> None:
        self._ask = ask
        self._clocks = clocks
        self._lock = threading.Lock()  # of all that follows; held while the store is asked, so that no thread overtakes
        self._seen = self._confirmed = clocks()
        self._suspended = False
        self._ask_after: tuple[float, ...] | None = None
        self._superseded: DriverSuperseded | None = None

    def confirm(self, since: tuple[float, ...]) -> None:
        """Note that the store has accepted a heartbeat which began at `since`, a result of `now`."""
        with self._lock:
            self._confirmed, self._suspended = since, False

    def now(self) -> tuple[float, ...]:
        """Return the times of the clocks, for `confirm`."""
        return self._clocks()

    def check(self) -> None:
        """Refuse to act if this driver was replaced.

        The store is asked only after the process seems to have been suspended: else this neither blocks nor costs
        anything, so that a file system that hangs costs no heartbeats of slots. A store that cannot be read then
        changes nothing but that it is asked again.

        Raises
        ------
        DriverSuperseded
            Another driver has begun.
        """
        with self._lock:
            self._refuse()
            now = self._clocks()
            self._suspended |= _apart(self._seen, now) > _LEASE
            if self._suspended and (self._ask_after is None or _apart(self._ask_after, now) > _RETRY):
                try:
                    self._consult()
                except OSError:
                    self._ask_after = self._clocks()
            self._seen = self._clocks()

    def require(self) -> None:
        """Refuse to act unless the store has confirmed this driver within the last seconds; may block.

        Raises
        ------
        DriverSuperseded
            Another driver has begun.
        OSError
            The store cannot be read for now.
        """
        with self._lock:
            self._refuse()
            if _apart(self._confirmed, self._clocks()) > _LEASE:
                self._consult()

    def allows(self) -> bool:
        """Return whether `check` raises no error."""
        try:
            self.check()
        except DriverSuperseded:
            return False
        return True

    def _refuse(self) -> None:
        if self._superseded is not None:
            raise DriverSuperseded(str(self._superseded))  # another object: a traceback for each thread

    def _consult(self) -> None:
        since = self._clocks()
        try:
            if self._ask is not None:
                self._ask()
        except DriverSuperseded as error:
            self._superseded = error
            raise
        except Exception as error:  # any reason for which the store does not answer
            raise OSError(errno.EIO, f"the state of the run cannot be read: {text_of(error)}") from error
        self._confirmed, self._suspended, self._ask_after = since, False, None


def _apart(before: tuple[float, ...], now: tuple[float, ...]) -> float:
    return max(abs(new - old) for old, new in zip(before, now, strict=True))
