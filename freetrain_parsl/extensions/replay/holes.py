"""Holes of a recorded machine as a stream of changes: the common representation of all kinds of logs."""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidInput, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

__all__ = ["Change", "Hole", "HoleLog", "HoleTable", "numbered_lines", "refuse_forecasts"]


@dataclass(frozen=True, slots=True)
class Hole:
    """An interval in which a node was idle, in seconds on the log's clock."""

    node: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Change:
    """The changes at one instant.

    Parameters
    ----------
    time
        Seconds on the log's clock.
    opened
        Holes that began.
    closed
        Nodes whose holes ended. A node may close and open at the same instant: closing comes first.
    expected
        If forecasts were requested: every node idle at this time -> when it was then expected to close, seconds,
        always after `time`; ``None`` if no job was planned on it, or it was due.
    due
        If forecasts were requested: the idle nodes that, according to the plan, a job should have by now. Most close
        soon, whereas nodes without a planned job stay idle for long.
    """

    time: float
    opened: tuple[Hole, ...]
    closed: tuple[str, ...]
    expected: Mapping[str, float | None] | None = None
    due: frozenset[str] = frozenset()


class HoleLog(ABC):
    """The idle nodes of a machine over time, from a recorded log.

    Attributes
    ----------
    name : str
        Name of the file.
    nodes : int
        Size of the machine.
    start, end : float
        The time that the log covers, seconds on its own clock; every hole lies within.
    skipped : int
        Malformed lines that were skipped, if requested.
    clipped : int
        Jobs that were given fewer nodes than recorded, because no more were free.
    zero_length : int
        Jobs that ended in the second in which they started: they take their nodes from training jobs like any other.
    masked : tuple of (float, float)
        Times that were removed because they look like outages: seconds after `start` on the log's clock, which is
        stopped during them, and their lengths.
    date : datetime or None
        The date of `start`, if known; without a time zone if the log has none.
    has_forecasts : bool
        Whether the log contains when holes were expected to close.
    kinds : mapping of str to str
        The kind of each node that is ever idle; empty if all nodes are alike.
    """

    name: str
    nodes: int
    start: float
    end: float
    skipped: int = 0
    clipped: int = 0
    zero_length: int = 0
    masked: tuple[tuple[float, float], ...] = ()
    date: datetime | None = None
    has_forecasts: bool = False
    kinds: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes in order of time, at most one per instant; each call starts from the beginning.

        Times are in [start, end): the end of the log, which ends every open hole, is not a change.
        With `forecasts`, instants at which only the queue changed are changes too.

        Raises
        ------
        InvalidSettings
            Forecasts are requested from a log that has none.
        """

    def mean_idle(self) -> float:
        """Return the mean number of idle nodes over the log's time."""
        return sum(self.mean_idle_by_kind().values())

    def mean_idle_by_kind(self) -> dict[str, float]:
        """Return the mean number of idle nodes of each kind over the log's time, in order of the kinds' names."""
        held = dict.fromkeys(sorted(set(self.kinds.values())) or [""], 0.0)
        for change in self.changes():
            for hole in change.opened:
                held[self.kinds.get(hole.node, "")] += hole.end - hole.start
        return {kind: seconds / (self.end - self.start) for kind, seconds in held.items()}


@dataclass(frozen=True)
class HoleTable:
    """Holes in compact arrays, one element per hole, in order of `starts`; `nodes` are indices into `names`."""

    names: Sequence[str]
    nodes: npt.NDArray[np.int32]
    starts: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.nodes)

    @classmethod
    def sorted(
        cls,
        names: Sequence[str],
        nodes: npt.ArrayLike,
        starts: npt.ArrayLike,
        ends: npt.ArrayLike,
    ) -> HoleTable:
        """Make a table of holes given in any order; holes of the same instant are sorted by node."""
        nodes, starts = np.asarray(nodes, np.int32), np.asarray(starts, np.float64)
        order = np.lexsort((nodes, starts))
        return cls(names, nodes[order], starts[order], np.asarray(ends, np.float64)[order])

    def times(self) -> npt.NDArray[np.float64]:
        """When holes open or close, increasing."""
        times: npt.NDArray[np.float64] = np.union1d(self.starts, self.ends)
        return times

    def changes(self, before: float = np.inf) -> Iterator[Change]:
        """Yield the changes earlier than `before`; each one is built when it is reached."""
        by_end = np.argsort(self.ends, kind="stable")
        times = self.times()
        times = times[times < before]
        opens = np.searchsorted(self.starts, times, side="right")
        closes = np.searchsorted(self.ends, times, side="right", sorter=by_end)
        opened = closed = 0
        for time, opened_by_then, closed_by_then in zip(times, opens, closes, strict=True):
            indices = slice(opened, opened_by_then)
            yield Change(
                float(time),
                tuple(
                    Hole(self.names[node], float(time), end)
                    for node, end in zip(self.nodes[indices].tolist(), self.ends[indices].tolist(), strict=True)
                ),
                tuple(self.names[node] for node in self.nodes[by_end[closed:closed_by_then]].tolist()),
            )
            opened, closed = opened_by_then, closed_by_then

    def within(self, start: float, end: float) -> HoleTable:
        """Remove everything before `start` and after `end`."""
        starts, ends = np.maximum(self.starts, start), np.minimum(self.ends, end)
        kept = starts < ends
        return HoleTable.sorted(self.names, self.nodes[kept], starts[kept], ends[kept])

    def without(self, spans: Sequence[tuple[float, float]]) -> HoleTable:
        """Remove non-overlapping spans of time; a hole that continues after one becomes two."""
        pieces = [(self.nodes, self.starts, ends := self.ends.copy())]
        for start, end in sorted(spans, reverse=True):  # last first: the rest is already cut off
            hit = (self.starts < end) & (ends > start)
            after = hit & (ends > end)
            pieces.append((self.nodes[after], np.full(np.count_nonzero(after), end), ends[after]))
            ends[hit] = start
        nodes, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
        kept = starts < ends
        return HoleTable.sorted(self.names, nodes[kept], starts[kept], ends[kept])

    def spans_above(self, idle: float, longer_than: float) -> list[tuple[float, float]]:
        """Find the spans of at least `longer_than` seconds in which at least `idle` nodes are idle throughout."""
        times = self.times()
        counts = np.searchsorted(self.starts, times, side="right") - np.searchsorted(
            np.sort(self.ends), times, side="right"
        )
        high = np.concatenate([[False], counts >= idle, [False]])
        edges = np.flatnonzero(high[1:] != high[:-1]).reshape(-1, 2)  # index of the first high, of the first low
        return [
            (float(times[first]), float(times[last]))
            for first, last in edges
            if times[last] - times[first] >= longer_than
        ]


def refuse_forecasts(name: str) -> InvalidSettings:
    """Return the error for a log without information about the queue."""
    return InvalidSettings(
        f"{name}: closing times cannot be estimated from this log; give a job log with requested walltimes, "
        "or --knowledge none or perfect"
    )


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of a text file's non-blank lines; decompressed if its name ends in ``.gz``.

    Raises
    ------
    InvalidInput
        The file cannot be read.
    """
    try:
        with (
            path.open("rb") as opened,
            gzip.open(opened) if path.suffix == ".gz" else opened as lines,
        ):
            for number, raw in enumerate(lines, start=1):
                if text := raw.decode("utf-8-sig", errors="replace").strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path}: cannot be read: {reason}") from error
