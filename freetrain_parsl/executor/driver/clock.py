"""Clocks for the driver: steps of the wall clock must not affect durations and deadlines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.windows.base import Survey

__all__ = ["SteadyClock", "SurveyTimes"]

_TOLERANCE = 0.5  # seconds by which a batch system's clock may seem to move without having been stepped


class SteadyClock:
    """Seconds since the epoch without jumps: the wall clock at creation, continued by a monotonic clock."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._origin = wall() - monotonic()

    def __call__(self) -> float:
        """Return the time."""
        return self._origin + self._monotonic()

    @property
    def lead(self) -> float:
        """Seconds by which the wall clock has been set forward (negative: back) since the creation of this clock."""
        return self._wall() - self()


class SurveyTimes:
    """Translates the times of a survey from the batch system's clock to the driver's.

    The offset of the two clocks is kept constant as long as possible, so that unchanged windows compare equal from one
    survey to the next. After a step of either clock, the smallest possible offset is used: nodes close too early rather
    than too late.
    """

    def __init__(self) -> None:
        self._shift = 0.0

    def translate(self, survey: Survey, now: float) -> Survey:
        """Return a survey that has just arrived, with all its times on the clock that shows `now`."""
        least, most = now - survey.took - survey.time, now - survey.time
        if not least - _TOLERANCE <= self._shift <= most + _TOLERANCE:
            self._shift = least
        return survey.shifted(self._shift)
