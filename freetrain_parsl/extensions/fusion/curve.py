"""Fusion curves: throughput of an array as a function of its number of members, and the best sizes of arrays."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl.errors import InvalidApp, InvalidInput
from freetrain_parsl.planning.curves.scaling import read_points

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike

    import numpy.typing as npt


__all__ = ["FusionCurve"]

_GAIN = 1.1
"""By how much an array must be faster than one by one, and larger sizes than smaller ones, as in `ArraySizing`."""
_TRIES = 2  # sizes in a row that may be without such a gain, as in `ArraySizing`
_EQUAL = 1e-9  # throughputs that differ by less are equal


@dataclass(frozen=True)
class FusionCurve:
    """Throughput of an array on one slot, relative to one of its members that trains alone there.

    Linear between the points and constant beyond the last one. A member alone is not an array: its throughput is 1.
    Neither concavity nor monotonicity is assumed.

    Parameters
    ----------
    points
        Pairs of a number of members and the relative throughput of all of them together, by increasing number. The
        point (1, 1.0) may be left out.

    Raises
    ------
    InvalidApp
        A number of members that is not an integer of at least 1 or does not increase, a throughput that is not
        positive and finite, or one other than 1 for one member.

    Examples
    --------
    >>> curve = FusionCurve([(2, 1.9), (4, 3.4), (8, 5.0), (16, 5.2)])
    >>> curve(3), curve.grouping(12, slots=2)
    (2.65, (6, 6))
    """

    points: tuple[tuple[int, float], ...]

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        checked = [_point(members, throughput) for members, throughput in points]
        for (before, _), (members, _) in pairwise(checked):
            if members <= before:
                raise InvalidApp(f"fusion curve: numbers of members must increase, got {members} after {before}")
        if not checked or checked[0][0] > 1:
            checked.insert(0, (1, 1.0))
        object.__setattr__(self, "points", tuple(checked))

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> FusionCurve:
        """Read a curve from CSV with the header ``members,throughput``, or from ``benchmarks/fusion.py --json``.

        The benchmark's file must have the rows of one network and batch size only. Its ratio of one member is that of
        an array of one, which is never formed, and is skipped.

        Raises
        ------
        InvalidInput
            The file cannot be read or is not a curve; the message contains the file and, if known, the line.
        """
        from freetrain_parsl.strict_yaml import read_text  # only a user's file needs it

        file = Path(path)
        reader = {".csv": _read_csv, ".json": _read_json}.get(file.suffix.lower())
        if reader is None:
            raise InvalidInput(f"{file}: a fusion curve is a .csv file, or the .json file of benchmarks/fusion.py")
        rows = reader(file, read_text(file, "fusion curve"))
        points = [(members, throughput) for _, members, throughput in rows]
        if not points:
            raise InvalidInput(f"{file}: fusion curve: needs at least one point, such as '2,1.9'")
        for last, (where, _, _) in enumerate(rows, 1):
            try:
                cls(points[:last][-2:])
            except InvalidApp as error:  # noqa: PERF203 - the line is needed
                raise InvalidInput(f"{where}: {error}") from error
        return cls(points)

    @property
    def largest(self) -> int:
        """The largest number of members that was measured; larger arrays are not formed."""
        return self.points[-1][0]

    def __call__(self, members: int) -> float:
        """Return the throughput of all `members` together, relative to one alone; zero for zero members.

        Raises
        ------
        InvalidApp
            A negative number of members.
        """
        if members < 0:
            raise InvalidApp(f"fusion curve: an array has at least one member, got {members}")
        counts, throughputs = zip(*self.points, strict=True)
        return float(np.interp(members, counts, throughputs)) if members else 0.0

    def best_size(self, limit: int | None = None) -> int:
        """Return the size of the fastest array that is worth its size, or 1 if no array is worth being formed.

        Sizes double until two in a row are not faster by a tenth than the smaller ones; the fastest is taken if it is
        faster by a tenth than its members one by one. This is what
        `freetrain_parsl.extensions.fusion.slot.sizing.ArraySizing` finds by timing steps.

        Parameters
        ----------
        limit
            Maximum size; ``None`` for the largest measured one.
        """
        limit = self.largest if limit is None else min(limit, self.largest)
        throughputs: dict[int, float] = {}
        size = min(2, limit)
        while size > 1 and size not in throughputs:
            throughputs[size] = self(size)
            before = list(throughputs.values())[:-_TRIES]
            if before and max(throughputs.values()) < _GAIN * max(before):
                break
            size = min(2 * size, limit)
        best = max(throughputs, key=lambda size: throughputs[size], default=1)
        return best if self(best) >= _GAIN else 1

    def grouping(self, count: int, slots: int, limit: int | None = None) -> tuple[int, ...]:
        """Return the sizes of arrays on single slots that maximise the total throughput; exact.

        Arrays that are not faster by a tenth than one by one are not formed. Among equal throughputs, fewer arrays are
        better, then more equal ones. Members that are in no array wait.

        Parameters
        ----------
        count
            How many members there are.
        slots
            How many slots there are for them.
        limit
            Maximum size of an array; ``None`` for the largest measured one.

        Returns
        -------
        tuple of int
            The size of each array, largest first; 1 is a member that trains alone. At most `slots` sizes with a sum of
            at most `count`.

        Raises
        ------
        InvalidApp
            A negative number of members or slots, or a limit below 1.
        """
        limit = self.largest if limit is None else limit
        if count < 0 or slots < 0 or limit < 1:
            raise InvalidApp(
                f"fusion curve: cannot group {count} members on {slots} slots with a limit of {limit} for an array"
            )
        return _grouping(self, count, slots, min(limit, self.largest))


@lru_cache(maxsize=4096)
def _grouping(curve: FusionCurve, count: int, slots: int, limit: int) -> tuple[int, ...]:
    slots = min(slots, count)
    count = min(count, slots * limit)
    values = [curve(size) for size in range(min(limit, count) + 1)]
    usable = [size for size, value in enumerate(values) if size == 1 or value >= _GAIN]
    gains = [after - before for before, after in pairwise(values)]
    if len(usable) == len(gains) and all(after <= before + _EQUAL for before, after in pairwise(gains)):
        return _grouping_by_even_split(values, count, slots)
    return _grouping_by_dynamic_programming(values, usable, count, slots)


def _grouping_by_even_split(values: Sequence[float], count: int, slots: int) -> tuple[int, ...]:
    """Solve for a curve of diminishing gains: sizes differ by one at most, and grow while that gains anything."""
    largest = max(size for size in range(len(values)) if not size or values[size] > values[size - 1] + _EQUAL)

    def split(arrays: int) -> tuple[int, ...]:
        size, larger = divmod(min(count, arrays * largest), arrays)
        return (size + 1,) * larger + (size,) * (arrays - larger)

    def total(arrays: int) -> float:
        return sum(values[size] for size in split(arrays))

    arrays = slots
    while arrays > 1 and total(arrays - 1) > total(slots) - _EQUAL:
        arrays -= 1
    return split(arrays) if arrays else ()


def _grouping_by_dynamic_programming(
    values: Sequence[float], usable: Sequence[int], count: int, slots: int
) -> tuple[int, ...]:
    """Solve for any curve, over the number of arrays and of members."""
    # For exactly so many arrays as there are rounds, and exactly so many members (index): the largest throughput, its
    # smallest inequality (the sum of the squared sizes), and the size of the last array.
    throughput = np.where(np.arange(count + 1) == 0, 0.0, -np.inf)
    inequality = np.zeros(count + 1, dtype=np.int64)
    last = np.zeros((slots + 1, count + 1), dtype=np.int32)
    best, arrays, members = 0.0, 0, 0
    for number in range(1, slots + 1):
        before, inequality_before = throughput, inequality
        throughput, inequality = np.full(count + 1, -np.inf), np.zeros(count + 1, dtype=np.int64)
        for size in usable:
            more = before[: count + 1 - size] + values[size]
            squares = inequality_before[: count + 1 - size] + size * size
            better = _better(more, squares, throughput[size:], inequality[size:])
            throughput[size:][better] = more[better]
            inequality[size:][better] = squares[better]
            last[number, size:][better] = size
        if throughput.max() > best + _EQUAL:
            best, arrays = float(throughput.max()), number
            equal = np.flatnonzero(throughput > best - _EQUAL)
            members = int(equal[np.argmin(inequality[equal])])
    groups = []
    for number in range(arrays, 0, -1):
        groups.append(int(last[number, members]))
        members -= groups[-1]
    return tuple(sorted(groups, reverse=True))


def _better(
    more: npt.NDArray[np.float64],
    squares: npt.NDArray[np.int64],
    throughput: npt.NDArray[np.float64],
    inequality: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Return where candidates have more throughput, or the same with less inequality."""
    possible = np.isfinite(more)
    return possible & ((more > throughput + _EQUAL) | ((more > throughput - _EQUAL) & (squares < inequality)))


def _point(members: Any, throughput: Any) -> tuple[int, float]:
    if isinstance(members, bool) or not isinstance(members, Integral) or members < 1:
        raise InvalidApp(f"fusion curve: a number of members must be a whole number of at least 1, got {members!r}")
    number = isinstance(throughput, Real) and not isinstance(throughput, bool)
    if not (number and math.isfinite(throughput) and throughput > 0):
        raise InvalidApp(f"fusion curve: a throughput must be a positive number, got {throughput!r}")
    if members == 1 and throughput != 1:
        raise InvalidApp(
            f"fusion curve: one member alone has throughput 1, got {throughput!r}; divide all throughputs by it"
        )
    return int(members), float(throughput)


def _read_csv(file: Path, text: str) -> list[tuple[str, Any, Any]]:
    """Return rows (file:line, members, throughput)."""
    rows = read_points(file, text, ("members", "throughput"))
    return [(f"{file}:{line}", members, throughput) for line, members, throughput in rows]


def _read_json(file: Path, text: str) -> list[tuple[str, Any, Any]]:
    """Return rows (file, members, ratio) of the benchmark's rows, without those of one member."""
    try:
        rows = json.loads(text)["rows"]
        found = [(str(file), row["members"], row["ratio"]) for row in rows if row["members"] != 1]
        kinds = sorted({(str(row["net"]), int(row["batch"])) for row in rows})
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"{file}: is not a file of benchmarks/fusion.py --json") from error
    if len(kinds) > 1:
        names = ", ".join(f"{net} {batch}" for net, batch in kinds)
        raise InvalidInput(f"{file}: has the curves of {names}; run the benchmark with one --nets and one --batches")
    return found
