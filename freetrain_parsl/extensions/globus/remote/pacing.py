"""How often a web service may be asked, when to look again for an answer, and when to give a call up.

The timeouts of the SDK are those of a socket: a connection over which bytes trickle never reaches them.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from freetrain_parsl.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HUNG", "RequestBudget", "call_within", "poll_delays"]

HUNG = 300.0
"""Seconds after which a call to a site is given up; its own timeout does not cover a connection that hangs."""

_MINUTE = 60.0

T = TypeVar("T")


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


def call_within(seconds: float, call: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> T:
    """Call in a thread that does not keep the process alive, and return what the call returns or raises.

    Parameters
    ----------
    seconds
        Limit.
    call
        What to call.
    give_up
        Called if the limit is reached.

    Raises
    ------
    RemoteError
        The call has not returned in time. Its thread may go on; what it returns is dropped.
    """
    outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        # Passed on to the thread that waits.
        except BaseException as error:  # noqa: BLE001 - see above
            outcome.put((None, error))

    threading.Thread(target=run, name="freetrain-call", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except Empty:
        give_up()
        raise RemoteError(
            f"no answer within {seconds:.0f} s: a connection hangs; the site may still do what was asked"
        ) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # the call has returned it
