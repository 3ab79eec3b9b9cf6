"""When the next periodic save is due, and how many failed saves are tolerated.

The interval is the one that minimizes the lost time: J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22(3), 2006, doi:10.1016/j.future.2004.11.016. Its first
term is J. W. Young's rule sqrt(2·C·M), "A first order approximation to the optimum checkpoint interval", Communications
of the ACM 17(9), 1974, doi:10.1145/361147.361115.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.protocol.options import SessionOptions

SHORTEST = timedelta(seconds=5)
"""Lower bound, to limit the load on the shared file system."""
LONGEST = timedelta(minutes=30)
"""Upper bound, to limit the work that a single rare failure can destroy."""

_WRITES = 2  # minimum interval, in multiples of the write time

TRIES = 5
"""Failed periodic saves after which a training job without any checkpoint ends."""

_ASSUMED_COPY_BYTES_PER_SECOND = 2e9  # before the first copy to host memory is measured
_MOST_DOUBLINGS = 6


class Schedule:
    """The times of periodic saves.

    Parameters
    ----------
    options
        Options of the training job: the interval, or the quantities that determine it.
    """

    def __init__(self, options: SessionOptions) -> None:
        self._fixed = options.checkpoint_interval
        self._mean_time_between_failures = options.mean_time_between_failures
        self._blocked = 0.0
        self._slowdown = 0.0
        self._asked: float | None = None
        self._anchor: float | None = None
        self._causes: set[tuple[object, ...]] = set()
        self.failures = 0
        """Failed saves since the last successful one."""

    def assume_size(self, size: int) -> None:
        """Set the expected bytes of a state, until a copy has been measured."""
        self._blocked = size / _ASSUMED_COPY_BYTES_PER_SECOND

    def measured(self, *, blocked: float | None = None, slowdown: float | None = None) -> None:
        """Record the measured cost of a save.

        Parameters
        ----------
        blocked
            Seconds for which the training job was blocked.
        slowdown
            Seconds by which the background write has slowed the training job.
        """
        self._blocked = self._blocked if blocked is None else blocked
        self._slowdown = self._slowdown if slowdown is None else slowdown

    def interval(self, write_seconds: float) -> timedelta:
        """Return the time from the start of a save, durable after `write_seconds`, to the start of the next."""
        interval = self._fixed
        if interval is None:
            cost = self._blocked + self._slowdown
            interval = checkpoint_interval(cost, write_seconds, self._mean_time_between_failures)
        if self.failures > 1:
            backed_off = interval * 2 ** min(self.failures - 1, _MOST_DOUBLINGS)
            interval = max(interval, min(backed_off, LONGEST))
        return interval

    def due(self, now: float, interval: timedelta) -> bool:
        """Return whether the interval is over; it starts with the last save or, before any save, the first call."""
        self._asked = now
        if self._anchor is None:
            self._anchor = now
        return now - self._anchor >= interval.total_seconds()

    def due_in(self, now: float, interval: timedelta) -> float:
        """Return the seconds until the next save is due."""
        return 0.0 if self._anchor is None else max(0.0, self._anchor + interval.total_seconds() - now)

    def saving(self) -> None:
        """Note that a save starts, at the time of the last call of `due`."""
        self._anchor = self._asked

    def succeeded(self) -> None:
        """Note that a save has succeeded."""
        self.failures = 0
        self._causes.clear()

    def failed(self, error: Exception) -> bool:
        """Note that a save has failed; return whether an earlier one had the same cause, with no success in between."""
        self.failures += 1
        cause = error.__cause__
        kind = (type(cause), getattr(cause, "errno", None))
        known = kind in self._causes
        self._causes.add(kind)
        return known


def best_work_between(cost: float, mean_time_between_failures: float) -> float:
    """Return the seconds of work between two checkpoints that minimize the lost time.

    Parameters
    ----------
    cost
        Seconds that a checkpoint costs the training job.
    mean_time_between_failures
        Seconds.
    """
    if cost >= 2 * mean_time_between_failures:
        return mean_time_between_failures
    share = cost / (2 * mean_time_between_failures)
    young = math.sqrt(2 * cost * mean_time_between_failures)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - cost


def checkpoint_interval(cost: float, write: float, mean_time_between_failures: timedelta) -> timedelta:
    """Return the time from the start of one checkpoint to the start of the next.

    Parameters
    ----------
    cost
        Seconds that a checkpoint costs the training job: time blocked, and slowdown.
    write
        Seconds from the start of a checkpoint until it is durable; writes never overlap.
    mean_time_between_failures
        Mean time between the failures after which a training job has to resume from a checkpoint.
    """
    best = cost + best_work_between(cost, mean_time_between_failures.total_seconds())
    clamped = min(max(best, SHORTEST.total_seconds()), LONGEST.total_seconds())
    return timedelta(seconds=max(clamped, _WRITES * write))
