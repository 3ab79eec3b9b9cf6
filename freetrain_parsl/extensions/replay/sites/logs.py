"""Logs of several sites on one clock: parts of logs, and the union of several as if they were one machine."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.holes import Change, Hole, HoleLog, refuse_forecasts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LogPart", "SiteLog", "UnionLog", "same_length"]


@dataclass(frozen=True)
class SiteLog:
    """A site and its holes; the logs of several sites begin at the same time, whatever their own clocks are."""

    name: str
    log: HoleLog


class LogPart(HoleLog):
    """A part of a log, in seconds after its start; holes that begin before it or end after it are cut.

    Raises
    ------
    InvalidSettings
        The part is not within the log.
    """

    def __init__(self, log: HoleLog, after: float = 0.0, seconds: float | None = None) -> None:
        span = log.end - log.start
        seconds = span - after if seconds is None else seconds
        if not (after >= 0 and seconds > 0 and after + seconds <= span):
            raise InvalidSettings(
                f"{log.name}: it lasts {span / 3600:.6g} h, which does not contain {seconds / 3600:.6g} h from "
                f"{after / 3600:.6g} h on"
            )
        self._log = log
        self.name, self.nodes = log.name, log.nodes
        self.start = log.start + after
        self.end = log.end if after + seconds == span else self.start + seconds
        self.skipped, self.clipped, self.zero_length = log.skipped, log.clipped, log.zero_length
        self.has_forecasts = log.has_forecasts
        self.date = None if log.date is None else log.date + timedelta(seconds=after)
        self.masked = tuple((begin - after, length) for begin, length in log.masked if after < begin < after + seconds)

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        already: dict[str, Hole] = {}  # idle when the part begins
        begun = False
        for change in self._log.changes(forecasts=forecasts):
            if change.time >= self.end:
                break
            if change.time < self.start:
                for node in change.closed:
                    already.pop(node, None)
                already.update((hole.node, hole) for hole in change.opened)
                continue
            if not begun and already and change.time > self.start:
                yield Change(self.start, tuple(self._cut(hole) for hole in already.values()), ())
            first = not begun and change.time == self.start
            opened = [] if not first else [hole for node, hole in already.items() if node not in change.closed]
            begun = True
            yield replace(
                change,
                opened=tuple(self._cut(hole) for hole in [*opened, *change.opened]),
                closed=() if first else change.closed,
            )
        if not begun and already:
            yield Change(self.start, tuple(self._cut(hole) for hole in already.values()), ())

    def _cut(self, hole: Hole) -> Hole:
        return Hole(hole.node, max(hole.start, self.start), min(hole.end, self.end))


class UnionLog(HoleLog):
    """The idle nodes of several sites as if they were one machine; its clock begins at zero."""

    def __init__(self, sites: Sequence[SiteLog]) -> None:
        self._sites = sites
        self.name = " + ".join(site.name for site in sites)
        self.nodes = sum(site.log.nodes for site in sites)
        self.start, self.end = 0.0, max(site.log.end - site.log.start for site in sites)
        self.skipped = sum(site.log.skipped for site in sites)
        self.clipped = sum(site.log.clipped for site in sites)
        self.zero_length = sum(site.log.zero_length for site in sites)

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        if forecasts:
            raise refuse_forecasts(self.name)
        pending: Change | None = None
        for change in heapq.merge(*map(self._shifted, self._sites), key=lambda change: change.time):
            if pending is None or pending.time < change.time:
                if pending is not None:
                    yield pending
                pending = change
            else:
                pending = Change(change.time, pending.opened + change.opened, pending.closed + change.closed)
        if pending is not None:
            yield pending

    @staticmethod
    def _shifted(site: SiteLog) -> Iterator[Change]:
        start = site.log.start
        for change in site.log.changes():
            yield Change(
                change.time - start,
                tuple(Hole(f"{site.name}:{one.node}", one.start - start, one.end - start) for one in change.opened),
                tuple(f"{site.name}:{node}" for node in change.closed),
            )


def same_length(sites: Sequence[SiteLog]) -> tuple[SiteLog, ...]:
    """Cut the logs to the length of the shortest one."""
    seconds = min(site.log.end - site.log.start for site in sites)
    return tuple(
        site if site.log.end - site.log.start == seconds else SiteLog(site.name, LogPart(site.log, 0.0, seconds))
        for site in sites
    )
