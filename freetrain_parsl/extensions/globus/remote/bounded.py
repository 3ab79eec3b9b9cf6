"""A call that is given up after some time, whatever holds it up.

The timeouts of the SDK are those of a socket: a connection over which bytes trickle never reaches them.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from freetrain_parsl.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HUNG", "call_within"]

HUNG = 300.0
"""Seconds after which a call to a site is given up; its own timeout does not cover a connection that hangs."""

T = TypeVar("T")


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
