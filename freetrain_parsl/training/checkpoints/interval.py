"""How often to save: as often as what is lost otherwise is worth.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22(3), 2006, doi:10.1016/j.future.2004.11.016. Its first term is J. W. Young's rule sqrt(2·C·M), "A first order
approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, doi:10.1145/361147.361115.
"""

from __future__ import annotations

import math
from datetime import timedelta

SHORTEST = timedelta(seconds=5)
"""Below this, the shared file system would get more requests than a training is worth."""
LONGEST = timedelta(minutes=30)
"""Above this, a rare loss would hurt more than rare losses on average suggest."""

_WRITES = 2  # an interval is at least so many writes long


def best_work_between(cost: float, mean_time_between_failures: float) -> float:
    """Return how many seconds to work between two checkpoints, so that the least time is lost.

    Parameters
    ----------
    cost
        Seconds that the training loses to a checkpoint.
    mean_time_between_failures
        Seconds.
    """
    if cost >= 2 * mean_time_between_failures:
        return mean_time_between_failures
    share = cost / (2 * mean_time_between_failures)
    young = math.sqrt(2 * cost * mean_time_between_failures)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - cost


def checkpoint_interval(cost: float, write: float, mean_time_between_failures: timedelta) -> timedelta:
    """Return the time from the beginning of a checkpoint to that of the next.

    Parameters
    ----------
    cost
        Seconds that the training loses to a checkpoint: for which it is stopped, and by which it is slowed down.
    write
        Seconds from a checkpoint's beginning until it is durable; writes never overlap.
    mean_time_between_failures
        Of the losses after which a training has to go back to a checkpoint.
    """
    best = cost + best_work_between(cost, mean_time_between_failures.total_seconds())
    clamped = min(max(best, SHORTEST.total_seconds()), LONGEST.total_seconds())
    return timedelta(seconds=max(clamped, _WRITES * write))
