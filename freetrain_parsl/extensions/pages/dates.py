"""The time axis: dates if the log has them, else the time since its start."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["TimeAxis", "period"]

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_STEPS = (
    *(_MINUTE * minutes for minutes in (1, 2, 5, 10, 20, 30)),
    *(_HOUR * hours for hours in (1, 2, 3, 6, 12)),
    *(_DAY * days for days in (1, 2, 5, 10, 20, 50, 100, 200)),
)
_DAYS = (1, 2, 4, 7, 14)
_MONTHS = (1, 2, 3, 6, 12, 24, 60)
_MOST = 8  # labels
_APART = 0.04  # of the axis: closer labels would overlap
_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class TimeAxis:
    """The time that a log covers.

    Parameters
    ----------
    seconds
        Its length, on the log's clock.
    begin
        The date of its start; ``None`` if unknown.
    masked
        When the log's clock is stopped, seconds after the start, and for how many seconds.
    """

    seconds: float
    begin: datetime | None = None
    masked: Sequence[tuple[float, float]] = ()

    @classmethod
    def of(cls, log: Mapping[str, Any]) -> TimeAxis:
        """Make the axis from the ``log`` of a replay's figures."""
        begin = None if log["date"] is None else datetime.fromisoformat(log["date"])
        return cls(log["seconds"], begin, [(at, seconds) for at, seconds in log["masked"]])

    @property
    def end(self) -> datetime | None:
        """The date of its end; ``None`` if unknown."""
        if self.begin is None:
            return None
        return self.begin + timedelta(seconds=self.seconds + sum(seconds for _, seconds in self.masked))

    def labels(self) -> list[tuple[float, str]]:
        """Return about nine or fewer labels (share of the axis, text), in order."""
        if self.seconds <= 0:
            return []
        if self.begin is None or self.end is None:
            return self._elapsed()
        labels: list[tuple[float, str]] = []
        for when, text in _dates(self.begin, self.end):
            share = self._position(when) / self.seconds
            if not labels or share - labels[-1][0] >= _APART:
                labels.append((share, text))
        return labels

    def _elapsed(self) -> list[tuple[float, str]]:
        step = next((step for step in _STEPS if self.seconds <= _MOST * step), _STEPS[-1] * 2)
        unit, name = (_DAY, "d") if step >= _DAY else (_HOUR, "h") if step >= _HOUR else (_MINUTE, "min")
        count = int(self.seconds / step)
        return [(i * step / self.seconds, f"{i * step / unit:g} {name}") for i in range(count + 1)]

    def _position(self, when: datetime) -> float:
        """Return the seconds on the log's clock; a removed date is where the clock is stopped."""
        assert self.begin is not None
        elapsed = (when - self.begin).total_seconds()
        for at, seconds in self.masked:
            if elapsed <= at:
                break
            elapsed = max(at, elapsed - seconds)
        return elapsed


def period(log: Mapping[str, Any]) -> str:
    """Format the first and last date of a log; empty if it has no dates."""
    axis = TimeAxis.of(log)
    if axis.begin is None or axis.end is None:
        return ""
    begin, end = _day(axis.begin), _day(axis.end)
    zone = " (UTC)" if axis.begin.tzinfo is not None else ""
    return f"{begin}{zone}" if begin == end else f"{begin} to {end}{zone}"


def _day(when: date) -> str:
    return f"{when.day} {_NAMES[when.month - 1]} {when.year}"


def _dates(begin: datetime, end: datetime) -> Iterator[tuple[datetime, str]]:
    """Yield round dates with their labels: hours, days or months, depending on the length of the log."""
    seconds = (end - begin).total_seconds()
    step = next((step for step in _STEPS if seconds <= _MOST * step), None)
    if step is not None and step < _DAY:
        yield from _times(begin, end, timedelta(seconds=step))
    elif (days := next((days for days in _DAYS if seconds <= _MOST * days * _DAY), None)) is not None:
        when = _midnight(begin) + timedelta(days=1)
        while when <= end:
            yield when, f"{when.day} {_NAMES[when.month - 1]}"
            when += timedelta(days=days)
    else:
        yield from _months(begin, end)


def _times(begin: datetime, end: datetime, step: timedelta) -> Iterator[tuple[datetime, str]]:
    when = _midnight(begin)
    while when <= end:
        if when >= begin:
            at_midnight = when == _midnight(when)
            yield when, f"{when.day} {_NAMES[when.month - 1]}" if at_midnight else f"{when:%H:%M}"
        when += step


def _months(begin: datetime, end: datetime) -> Iterator[tuple[datetime, str]]:
    months = (end.year - begin.year) * 12 + end.month - begin.month
    step = next((step for step in _MONTHS if months <= _MOST * step), 12 * (months // (12 * _MOST) + 1))
    number = begin.year * 12 + begin.month  # of the month after the first, from 0 in the year 0
    while True:
        when = _midnight(begin).replace(year=number // 12, month=number % 12 + 1, day=1)
        if when > end:
            return
        yield when, f"{_NAMES[when.month - 1]} {when.year}"
        number += step


def _midnight(when: datetime) -> datetime:
    return when.replace(hour=0, minute=0, second=0, microsecond=0)
