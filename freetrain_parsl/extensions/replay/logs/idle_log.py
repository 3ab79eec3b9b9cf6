"""Reader of idle logs: CSV with the header ``node,start,end``, one idle interval per line, seconds."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.holes import HoleLog, HoleTable, numbered_lines, refuse_forecasts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from freetrain_parsl.extensions.replay.holes import Change

__all__ = ["IDLE_HEADER", "IdleLog"]

IDLE_HEADER = "node,start,end"


class _Interval(NamedTuple):
    node: str
    start: float
    end: float


class IdleLog(HoleLog):
    """The holes listed in an idle log.

    Lines that begin with ``#`` are comments; the header ``node,start,end`` is optional. Adjacent intervals of a node
    are merged into one hole. The log covers the time from its first start to its last end.

    Raises
    ------
    InvalidInput
        The log cannot be read or is empty, a line is malformed, or intervals of a node overlap.
    InvalidSettings
        The log has more nodes than `nodes`.
    """

    def __init__(self, path: Path, *, nodes: int | None = None, lenient: bool = False) -> None:
        self.name = path.name
        self._path = path
        self._lenient = lenient
        self.table = self._read()
        seen = len(self.table.names)
        if nodes is not None and nodes < seen:
            raise InvalidSettings(
                f"{path}: it has {seen} distinct nodes, more than the {nodes} given; give {seen} or more"
            )
        self.nodes = seen if nodes is None else nodes
        self.start, self.end = float(self.table.starts[0]), float(self.table.ends.max())

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        if forecasts:
            raise refuse_forecasts(self.name)
        return self.table.changes(before=self.end)

    def _read(self) -> HoleTable:
        index: dict[str, int] = {}
        nodes, starts, ends, lines = array("i"), array("d"), array("d"), array("q")
        for number, text in numbered_lines(self._path):
            if text.startswith("#") or "".join(text.lower().split()) == IDLE_HEADER:
                continue
            interval = _parse(text)
            if isinstance(interval, str):
                self._skip(number, interval)
                continue
            nodes.append(index.setdefault(interval.node, len(index)))
            starts.append(interval.start)
            ends.append(interval.end)
            lines.append(number)
        if not nodes:
            raise InvalidInput(f"{self._path}: no idle intervals; each line is '{IDLE_HEADER}', times in seconds")
        return self._merged(tuple(index), nodes, starts, ends, lines)

    def _merged(self, names: tuple[str, ...], *columns: array[int] | array[float]) -> HoleTable:
        """Merge adjacent intervals of a node; reject overlapping ones."""
        nodes, starts, ends, lines = (np.asarray(column) for column in columns)
        order = np.lexsort((starts, nodes))
        kept_nodes, kept_starts, kept_ends = array("i"), array("d"), array("d")
        last, free_from, last_line = -1, -math.inf, 0
        for position in order:
            node, start, end, line = nodes[position], starts[position], ends[position], int(lines[position])
            if node == last and start < free_from:
                first, second = sorted((last_line, line))
                self._skip(second, f"node {names[node]!r} is already idle by line {first}; intervals must not overlap")
            elif node == last and start == free_from:
                kept_ends[-1] = free_from = end
                last_line = line
            else:
                kept_nodes.append(node)
                kept_starts.append(start)
                kept_ends.append(end)
                last, free_from, last_line = node, end, line
        return HoleTable.sorted(names, kept_nodes, kept_starts, kept_ends)

    def _skip(self, line: int, problem: str) -> None:
        """Count a malformed line, or reject the log because of it."""
        if not self._lenient:
            raise InvalidInput(f"{self._path}:{line}: {problem}; fix it, or read leniently to skip such lines")
        self.skipped += 1


def _parse(text: str) -> _Interval | str:
    """Parse an interval; return an error message if it is malformed."""
    fields = [field.strip() for field in text.split(",")]
    if len(fields) != 3 or not fields[0]:
        return f"expected '{IDLE_HEADER}', got {text[:80]!r}"
    try:
        start, end = float(fields[1]), float(fields[2])
    except ValueError:
        start = end = math.nan
    if not (math.isfinite(start) and math.isfinite(end)):
        return f"start and end must be numbers of seconds, got {text[:80]!r}"
    if end <= start:
        return f"an interval must end after it starts, got {start:g} to {end:g}"
    return _Interval(fields[0], start, end)
