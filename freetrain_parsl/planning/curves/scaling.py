"""Scaling curves: throughput (samples per second) as a function of the number of nodes."""

from __future__ import annotations

import csv
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidApp, InvalidInput

__all__ = ["LEARN", "CurveLike", "ScalingCurve", "read_points"]

_DEFAULT_GAIN_OF_DOUBLING = 1.8  # 90 % of the ideal 2
_DEFAULT_DOUBLINGS = 16
LEARN = "learn"
"""The user's word for a curve that is to be learned."""


def read_points(file: Path, text: str, header: tuple[str, str]) -> list[tuple[int, Any, Any]]:
    """Read CSV with this header: an integer and a number in each line.

    Returns
    -------
    rows
        Line, and both values; those that are not numbers remain strings, for the caller to reject.

    Raises
    ------
    InvalidInput
        Another header, or another number of columns; the message contains the file and the line.
    """
    reader = csv.reader(text.splitlines())
    wanted = ",".join(header)
    found = ",".join(name.strip().lower() for name in next(reader, []))
    if found != wanted:
        raise InvalidInput(f"{file}:1: the first line must be {wanted!r}, got {found!r}")
    rows = []
    for row in reader:
        if not row:
            continue
        if len(row) != 2:
            raise InvalidInput(f"{file}:{reader.line_num}: expected {wanted!r}, got {','.join(row)!r}")
        rows.append((reader.line_num, _number(row[0], int), _number(row[1], float)))
    return rows


def _number(text: str, kind: type[int | float]) -> int | float | str:
    try:
        return kind(text)
    except ValueError:
        return text


class ScalingCurve:
    """Throughput as a function of the number of nodes, piecewise linear through the known points.

    Linear between points, constant beyond the last, zero on zero nodes; a count below the first point is rejected.
    Neither concavity nor monotonicity is assumed: real curves have steps. Immutable, hashable and picklable.

    Parameters
    ----------
    points
        Number of nodes -> samples per second: a mapping in any order, or pairs by increasing number of nodes.
    relative
        Whether the rates are relative to one node instead of samples per second, as in `default`. The first
        measurement scales such a curve as a whole.

    Raises
    ------
    InvalidApp
        No points, a count that is not an integer of at least 1 or does not increase, or a rate that is negative or not
        finite.

    Examples
    --------
    >>> curve = ScalingCurve({1: 100.0, 2: 190.0, 4: 300.0})
    >>> curve(3), curve(64)
    (245.0, 300.0)
    """

    __slots__ = ("_points", "_relative")

    def __init__(self, points: Mapping[int, float] | Iterable[tuple[int, float]], *, relative: bool = False) -> None:
        if isinstance(points, Mapping):
            checked = sorted(map(_point, points.items()))
        else:
            checked = [_point(pair) for pair in points]
        for (before, _), (nodes, _) in pairwise(checked):
            if nodes <= before:
                raise InvalidApp(f"scaling curve: numbers of nodes must increase, got {nodes} after {before}")
        if not checked:
            raise InvalidApp("scaling curve: needs at least one point, such as {1: 100.0}")
        self._points = tuple(checked)
        self._relative = relative

    @classmethod
    def default(cls) -> ScalingCurve:
        """Return the curve used when nothing is known: each doubling keeps 90 % of the efficiency.

        Rates are relative to one node: 1, 1.8, 3.24, … at 1, 2, 4, … 65536 nodes.
        """
        return cls([(1 << k, _DEFAULT_GAIN_OF_DOUBLING**k) for k in range(_DEFAULT_DOUBLINGS + 1)], relative=True)

    @classmethod
    def to_be_learned(cls) -> ScalingCurve:
        """Return the curve of a training job whose larger sizes are searched, beginning with its smallest."""
        return cls([(1, 1.0)], relative=True)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> ScalingCurve:
        """Read a curve from CSV (header ``nodes,rate``) or, with suffix .yaml or .yml, a YAML mapping.

        Raises
        ------
        InvalidInput
            The file cannot be read or is not a curve; the message contains the file and, if known, the line.
        """
        file = Path(path)
        readers = {".csv": _read_csv, ".yaml": _read_yaml, ".yml": _read_yaml}
        reader = readers.get(file.suffix.lower())
        if reader is None:
            raise InvalidInput(f"{file}: a scaling curve is a .csv, .yaml or .yml file, or the word 'learn'")
        from freetrain_parsl.strict_yaml import read_text  # only a user's file needs YAML

        text = read_text(file, "scaling curve")
        rows = reader(file, text)
        previous = 0
        for line, nodes, rate in rows:
            try:
                _rate(rate)
                count = _node_count(nodes)
            except InvalidApp as error:
                raise InvalidInput(f"{file}:{line}: {error}") from error
            if count <= previous:
                raise InvalidInput(f"{file}:{line}: numbers of nodes must increase, got {count} after {previous}")
            previous = count
        if not rows:
            raise InvalidInput(f"{file}: scaling curve: needs at least one point")
        return cls([(nodes, rate) for _, nodes, rate in rows])

    @classmethod
    def of(cls, value: CurveLike) -> ScalingCurve:
        """Convert a user's mapping, pairs, file path or curve to a curve; ``None`` gives the default.

        The text ``"learn"`` is no file, but `to_be_learned`.
        """
        if value is None:
            return cls.default()
        if isinstance(value, ScalingCurve):
            return value
        if isinstance(value, (str, PathLike)):
            return cls.to_be_learned() if value == LEARN else cls.from_file(value)
        if isinstance(value, Mapping):
            return cls(value)
        if isinstance(value, Iterable):
            return cls(value)
        raise InvalidApp(f"scaling curve: expected a mapping, pairs, or a file path, got {value!r}")

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """The known points (nodes, samples per second), in order of the number of nodes."""
        return self._points

    @property
    def first_nodes(self) -> int:
        """The smallest number of nodes for which the curve is defined."""
        return self._points[0][0]

    @property
    def last_nodes(self) -> int:
        """The number of nodes from which the curve is constant."""
        return self._points[-1][0]

    @property
    def unknown(self) -> bool:
        """Whether the curve has no shape: it is to be learned."""
        return self._relative and len(self._points) == 1

    @property
    def relative(self) -> bool:
        """Whether the rates are relative to one node instead of samples per second."""
        return self._relative

    def __call__(self, nodes: int) -> float:
        """Return the samples per second on `nodes` nodes.

        Raises
        ------
        InvalidApp
            A number of nodes below the first point, other than zero.
        """
        if nodes == 0:
            return 0.0
        if nodes < self.first_nodes:
            raise InvalidApp(f"scaling curve: starts at {self.first_nodes} nodes; add a point at or below {nodes}")
        counts, rates = zip(*self._points, strict=True)
        return float(np.interp(nodes, counts, rates))

    def rates(self, max_nodes: int) -> npt.NDArray[np.float64]:
        """Tabulate the samples per second on 0, 1, …, `max_nodes` nodes, shape (max_nodes + 1,).

        NaN where the curve is undefined: above zero and below its first point.
        """
        counts, rates = zip(*self._points, strict=True)
        table: npt.NDArray[np.float64] = np.interp(np.arange(max_nodes + 1), counts, rates)
        table[: self.first_nodes] = np.nan
        table[0] = 0.0
        return table

    def scaled(self, factor: float) -> ScalingCurve:
        """Return the curve with all rates multiplied by a factor; a relative curve stays relative."""
        return ScalingCurve([(nodes, factor * rate) for nodes, rate in self._points], relative=self._relative)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScalingCurve):
            return NotImplemented
        return (self._points, self._relative) == (other._points, other._relative)

    def __hash__(self) -> int:
        return hash((self._points, self._relative))

    def __repr__(self) -> str:
        relative = ", relative=True" if self._relative else ""
        return f"ScalingCurve({dict(self._points)!r}{relative})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._points, self._relative)


CurveLike = ScalingCurve | Mapping[int, float] | Iterable[tuple[int, float]] | str | PathLike[str] | None
"""Values accepted by `ScalingCurve.of`."""


def _restore(points: tuple[tuple[int, float], ...], relative: bool) -> ScalingCurve:  # noqa: FBT001 - pickle's
    return ScalingCurve(points, relative=relative)


def _point(pair: Any) -> tuple[int, float]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InvalidApp(f"scaling curve: a point is a pair (nodes, samples per second), got {pair!r}")
    return _node_count(pair[0]), _rate(pair[1])


def _node_count(value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise InvalidApp(f"scaling curve: a number of nodes must be a whole number of at least 1, got {value!r}")
    return count


def _rate(value: Any) -> float:
    try:
        rate = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise InvalidApp(f"scaling curve: a rate must be zero or more samples per second, got {value!r}")
    return rate


def _read_csv(file: Path, text: str) -> list[tuple[int, Any, Any]]:
    return read_points(file, text, ("nodes", "rate"))


def _read_yaml(file: Path, text: str) -> list[tuple[int, Any, Any]]:
    """Return rows (line, nodes, rate) in file order; the node tree preserves lines and duplicate keys."""
    import yaml

    from freetrain_parsl.strict_yaml import compose, construct

    root = compose(text, str(file))
    if not isinstance(root, yaml.MappingNode):
        raise InvalidInput(f"{file}: a scaling curve is a mapping of nodes to rates, such as '1: 100.0'")
    rows = []
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not (isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)):
            raise InvalidInput(f"{file}:{line}: expected a number of nodes and a rate, such as '1: 100.0'")
        try:
            rows.append((line, construct(key.tag, key.value), construct(value.tag, value.value)))
        except InvalidInput as error:
            raise InvalidInput(f"{file}:{line}: {error}") from None
    return rows
