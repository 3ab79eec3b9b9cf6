"""Time for the driver: wall clocks are set and stepped, durations and deadlines must not notice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.windows.base import Survey

__all__ = ["SteadyClock", "SurveyTimes"]

_TOLERANCE = 0.5  # seconds by which a batch system's clock may seem to move without having been stepped


class SteadyClock:
    """Seconds since the epoch that never jump: the wall clock when this was made, continued by a monotonic clock.

    Parameters
    ----------
    wall
        Seconds since the epoch; may be stepped at any time.
    monotonic
        Seconds; never stepped.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._origin = wall() - monotonic()

    def __call__(self) -> float:
        """Return the time."""
        return self._origin + self._monotonic()

    @property
    def lead(self) -> float:
        """By how many seconds the wall clock has been set forward (negative: back) since this was made."""
        return self._wall() - self()


class SurveyTimes:
    """Translates what a batch system says, by its own clock, to the clock of whoever asked.

    The difference of the two clocks is kept as it is for as long as that is possible, so that windows that have not
    changed compare equal from one survey to the next. After a step of either clock it is the smallest possible one:
    nodes then close rather too early than too late.
    """

    def __init__(self) -> None:
        self._shift = 0.0

    def translate(self, survey: Survey, now: float) -> Survey:
        """Return the survey, which has just come in, with all its times on the clock that shows `now`."""
        least, most = now - survey.took - survey.time, now - survey.time
        if not least - _TOLERANCE <= self._shift <= most + _TOLERANCE:
            self._shift = least
        return survey.shifted(self._shift)
