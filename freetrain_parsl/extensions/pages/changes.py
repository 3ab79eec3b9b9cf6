"""Tables of which a reader gets the changes since a version; compact as JSON: one array per column."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CurvePoints", "Rows"]


class Rows:
    """Rows that are added and changed, never removed; of the oldest ones only the content is dropped.

    Parameters
    ----------
    columns
        Their names.
    version
        Returns the version that a change belongs to; it never falls.
    most
        Number of rows that are kept; ``None``: all.
    """

    def __init__(self, columns: Sequence[str], version: Callable[[], int], most: int | None = None) -> None:
        self.columns = tuple(columns)
        self._index = {name: place for place, name in enumerate(self.columns)}
        self._version = version
        self._most = most
        self._rows: dict[int, list[Any]] = {}
        self._changed: dict[int, int] = {}
        """Row -> version of its last change, the last changed one last."""
        self.count = 0
        """Number of rows so far, dropped ones included."""

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def add(self, *values: Any) -> int:
        """Add a row, and return its number, from 0."""
        number, self.count = self.count, self.count + 1
        self._rows[number] = list(values)
        self._changed[number] = self._version()
        if self._most is not None and len(self._rows) > self._most:
            oldest = next(iter(self._rows))
            del self._rows[oldest], self._changed[oldest]
        return number

    def change(self, number: int, /, **values: Any) -> None:
        """Change columns of a row; ignored if nothing changes, or if the row has been dropped."""
        row = self._rows.get(number)
        if row is None or all(row[self._index[name]] == value for name, value in values.items()):
            return
        for name, value in values.items():
            row[self._index[name]] = value
        del self._changed[number]
        self._changed[number] = self._version()

    def value(self, number: int, column: str) -> Any:
        """Return the value of a row that has not been dropped."""
        return self._rows[number][self._index[column]]

    def since(self, version: int) -> dict[str, Any] | None:
        """Return the rows changed after a version: ``row`` with their numbers, and each column; ``None``: no change."""
        numbers = []
        for number in reversed(self._changed):
            if self._changed[number] <= version:
                break
            numbers.append(number)
        if not numbers:
            return None
        numbers.sort()
        rows = [self._rows[number] for number in numbers]
        columns = {name: [row[place] for row in rows] for name, place in self._index.items()}
        return {"row": numbers, "first": self.count - len(self._rows), **columns}


class CurvePoints:
    """Values against steps, by training and name; a curve of `most` points loses every second one."""

    def __init__(self, version: Callable[[], int], most: int = 256) -> None:
        self._version = version
        self._most = most
        self._curves: dict[tuple[int, str], _Curve] = {}

    def add(self, training: int, name: str, step: int, value: float) -> None:
        """Add a point; one whose step is not above the last one replaces those from its step on."""
        if not math.isfinite(value):
            return
        curve = self._curves.setdefault((training, name), _Curve())
        curve.add(self._version(), step, value, self._most)

    def end(self, training: int, name: str, step: int, value: float) -> None:
        """Add the last point of a curve, unless it has it."""
        curve = self._curves.get((training, name))
        if curve is None or curve.last_step < step:
            self.add(training, name, step, value)

    def since(self, version: int) -> list[dict[str, Any]]:
        """Return the curves changed after a version, each with its points from the number ``from`` on."""
        found = []
        for (training, name), curve in self._curves.items():
            if curve.changed > version:
                found.append({"training": training, "name": name, **curve.since(version)})
        return found


class _Curve:
    def __init__(self) -> None:
        self.changed = 0
        self._rewritten = 0
        self._stride = 1
        self._skipped = 0
        self._points: list[tuple[int, int, float]] = []  # version, step, value
        self._last: tuple[int, int, float] | None = None
        """The newest point, if the stride leaves it out."""

    @property
    def last_step(self) -> int:
        last = self._last or (self._points[-1] if self._points else None)
        return -1 if last is None else last[1]

    def add(self, version: int, step: int, value: float, most: int) -> None:
        self.changed = version
        self._last = None
        while self._points and self._points[-1][1] >= step:  # the training job resumed from a checkpoint
            self._points.pop()
        self._skipped += 1
        if self._skipped < self._stride and self._points:
            self._last = (version, step, value)
            return
        self._skipped = 0
        self._points.append((version, step, value))
        if len(self._points) > most:
            del self._points[1::2]
            self._stride *= 2
            self._rewritten = version

    def since(self, version: int) -> dict[str, Any]:
        points = self._points if self._last is None else [*self._points, self._last]
        start = 0
        if self._rewritten <= version:
            start = next((place for place, point in enumerate(points) if point[0] > version), len(points))
        new = points[start:]
        return {"from": start, "step": [point[1] for point in new], "value": [_short(point[2]) for point in new]}


def _short(value: float) -> float:
    return float(f"{value:.5g}")
