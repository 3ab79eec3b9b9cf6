"""What a driver shows: a terminal, a pipe or a file that fails costs lines, never the run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")

__all__ = ["contained"]


def contained(function: Callable[_P, object]) -> Callable[_P, None]:
    """Return a function that logs the first exception of this one, and passes on none."""
    failed = False

    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal failed
        try:
            function(*args, **kwargs)
        except Exception:  # whatever fails in a display, the run goes on
            logger.log(logging.DEBUG if failed else logging.WARNING, "the run cannot be shown", exc_info=True)
            failed = True

    return call
