"""A log without the times that look like outages, during which its clock is stopped."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.replay.holes import Change, HoleLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LogWithoutOutages"]


class LogWithoutOutages(HoleLog):
    """A log from which spans of time are removed, so that they do not affect any mean.

    The clock of this log is stopped during a span: its length, and every figure that is a time or a share of time,
    refers to the remaining time. A node that was idle before and after a span closes and opens at that instant.

    Parameters
    ----------
    log
        The log; no node is idle in it during the spans (`HoleTable.without`).
    spans
        (start, end), seconds on that log's clock, in order and disjoint.
    """

    def __init__(self, log: HoleLog, spans: Sequence[tuple[float, float]]) -> None:
        self._log = log
        self._starts = [start for start, _ in spans]
        self._resumes = [log.start, *(end for _, end in spans)]
        """Times of the original clock at the beginning and after each span."""
        self._offsets = [log.start]
        """The corresponding times of this log's clock."""
        for start, resumed in zip(self._starts, self._resumes, strict=False):
            self._offsets.append(self._offsets[-1] + (start - resumed))
        self.name, self.nodes = log.name, log.nodes
        self.start, self.end = log.start, self._time(log.end)
        self.skipped, self.clipped, self.zero_length = log.skipped, log.clipped, log.zero_length
        self.has_forecasts, self.date = log.has_forecasts, log.date
        self.masked = tuple(
            (offset - self.start, end - start) for offset, (start, end) in zip(self._offsets[1:], spans, strict=True)
        )

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        pending: Change | None = None
        for change in self._log.changes(forecasts=forecasts):
            if self._is_inside(change.time):
                continue
            moved = self._moved(change)
            if pending is not None and pending.time < moved.time:
                yield pending
            elif pending is not None:  # a span was removed at this instant: merge the changes at its start and end
                moved = replace(moved, opened=pending.opened + moved.opened, closed=pending.closed + moved.closed)
            pending = moved
        if pending is not None and pending.time < self.end:
            yield pending

    def _moved(self, change: Change) -> Change:
        now = self._time(change.time)
        opened = tuple(replace(hole, start=now, end=self._time(hole.end)) for hole in change.opened)
        if change.expected is None:
            return replace(change, time=now, opened=opened)
        later = math.nextafter(now, math.inf)
        expected = {
            node: None if closes is None else max(later, self._time(closes)) for node, closes in change.expected.items()
        }
        return replace(change, time=now, opened=opened, expected=expected)

    def _is_inside(self, time: float) -> bool:
        number = bisect_right(self._starts, time)
        return number > 0 and self._starts[number - 1] < time < self._resumes[number]

    def _time(self, time: float) -> float:
        """Convert a time of the original clock to this log's."""
        number = bisect_right(self._resumes, time) - 1
        if number < 0:
            return time
        moved = self._offsets[number] + (time - self._resumes[number])
        return min(moved, self._offsets[number + 1]) if number + 1 < len(self._offsets) else moved
