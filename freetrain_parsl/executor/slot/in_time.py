"""A limit on the time of the user's code where the driver would wait for it, too."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

__all__ = ["TooSlow", "in_time"]


class TooSlow(Exception):
    """The user's code takes too long."""


def in_time(make: Callable[[], _T], seconds: float) -> _T:
    """Return what the user's code makes in another thread, which nothing can end; while it lasts, heartbeats go on.

    Raises
    ------
    TooSlow
        It takes more than `seconds`.
    """
    made: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, name="freetrain-in-time", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the user's code has started as many as there may be
        return make()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not made:
        raise TooSlow
    return made[0]
