"""The checkpoint interval that minimizes the lost time.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22(3), 2006, doi:10.1016/j.future.2004.11.016. Its first term is J. W. Young's rule sqrt(2·C·M), "A first order
approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, doi:10.1145/361147.361115.
"""

from __future__ import annotations

import math
from datetime import timedelta

SHORTEST = timedelta(seconds=5)
"""Lower bound, to limit the load on the shared file system."""
LONGEST = timedelta(minutes=30)
"""Upper bound, to limit the work that a single rare failure can destroy."""

_WRITES = 2  # minimum interval, in multiples of the write time


def best_work_between(cost: float, mean_time_between_failures: float) -> float:
    """Return the seconds of work between two checkpoints that minimize the lost time.

    Parameters
    ----------
    cost
        Seconds that a checkpoint costs the training.
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
        Seconds that a checkpoint costs the training: time blocked, and slowdown.
    write
        Seconds from the start of a checkpoint until it is durable; writes never overlap.
    mean_time_between_failures
        Mean time between the failures after which a training has to resume from a checkpoint.
    """
    best = cost + best_work_between(cost, mean_time_between_failures.total_seconds())
    clamped = min(max(best, SHORTEST.total_seconds()), LONGEST.total_seconds())
    return timedelta(seconds=max(clamped, _WRITES * write))
