"""Pure: how often a web service may be asked, and when to look again for an answer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RequestBudget", "poll_delays"]

_MINUTE = 60.0


class RequestBudget:
    """At most so many requests in any period of one minute.

    Parameters
    ----------
    per_minute
        Number of requests.

    Attributes
    ----------
    taken : int
        All requests so far.
    """

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._times: deque[float] = deque()
        self.taken = 0

    def take(self, now: float) -> float:
        """Return the seconds to wait before the next request, which is then counted.

        Parameters
        ----------
        now
            Monotonic time, seconds; never decreases.
        """
        while self._times and self._times[0] <= now - _MINUTE:
            self._times.popleft()
        start = now if len(self._times) < self._most else self._times[-self._most] + _MINUTE
        self._times.append(start)
        self.taken += 1
        return start - now


def poll_delays(first: float = 0.5, growth: float = 1.25, longest: float = 15.0) -> Iterator[float]:
    """Yield the seconds between looks for an answer: growing, up to the longest.

    An answer is noticed late by `growth` less one of the time that it took, at most.
    """
    delay = first
    while True:
        yield delay
        delay = min(longest, delay * growth)
