"""The interface of a tracker, and the files with the values of trainings: a JSON object a line, in rising steps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from freetrain_parsl.texts import storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "Outcome",
    "Row",
    "TrackedTraining",
    "Tracker",
    "Value",
    "as_line",
    "fresh",
    "last_steps",
    "parse_row",
    "read_rows",
]

Value: TypeAlias = bool | int | float | str
"""A value of `session.log`."""

Outcome: TypeAlias = Literal["finished", "failed", "cancelled", "interrupted"]
"""How a training ended; an interrupted one goes on later, as after a stop of its campaign."""

_MOST_STEPS = 1 << 53
_LARGEST_INT = (1 << 63) - 1
_LATEST = 1e12  # seconds since the epoch


@dataclass(frozen=True)
class TrackedTraining:
    """A training, as trackers see it.

    Parameters
    ----------
    name
        Its name.
    id
        The same in all fragments and with all drivers, and of no other training: 16 hexadecimal digits.
    directory
        A directory for the tracker's files about it, the same each time; exists, private to the user.
    """

    name: str
    id: str
    directory: Path


@dataclass(frozen=True)
class Row:
    """The values of one step.

    Parameters
    ----------
    step
        Number of optimizer steps.
    time
        Seconds since the epoch.
    values
        Name -> value.
    """

    step: int
    time: float
    values: Mapping[str, Value]


class Tracker(Protocol):
    """Receives the values of one training; used by one thread. Any exception makes it be closed and opened again later.

    One training has one run in the tracker. What it has of that run it knows best, after a crash, too: so `open` says
    it, and only what is missing follows.

    The class of a registered tracker may state what is checked before a training starts: ``options``, the names of its
    parameters, which are then strings, and ``package``, the package that it imports and what ``pip install`` needs
    for it.
    """

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """Create the training's run, or open the one with its id.

        Returns
        -------
        steps
            The last step of each value that the run has: name -> step.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Add values; for each name, steps rise."""

    def close(self, outcome: Outcome) -> None:
        """Make everything durable and end the run; it may be opened again."""


def parse_row(text: str) -> Row | None:
    """Return a row; ``None`` if the text is not one."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step, time, values = row.get("step"), row.get("time"), row.get("values")
    if not isinstance(step, int) or not 0 <= step < _MOST_STEPS or not isinstance(values, dict):
        return None
    if not isinstance(time, (int, float)) or not 0 <= time < _LATEST:
        return None
    return Row(
        step,
        time,
        {storable(name): _value(value) for name, value in values.items() if isinstance(value, (str, int, float))},
    )


def _value(value: Value) -> Value:
    """Return a value that every tracker can store: one that it refuses would hold up all that follow."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value


def as_line(row: Row) -> str:
    """Return a row as it is in the file."""
    return json.dumps({"step": row.step, "time": row.time, "values": dict(row.values)}) + "\n"


def fresh(rows: Iterable[Row], steps: dict[str, int]) -> Iterator[Row]:
    """Yield the rows without the values whose steps do not rise; updates `steps`: name -> last step."""
    for row in rows:
        values = {name: value for name, value in row.values.items() if row.step > steps.get(name, -1)}
        if values:
            steps.update(dict.fromkeys(values, row.step))
            yield Row(row.step, row.time, values)


def read_rows(path: Path, offset: int = 0, most: int = 1 << 20) -> tuple[list[Row], int]:
    """Return the rows of a file after `offset`, in bytes, and where the next ones begin; of about `most` bytes.

    An incomplete line is left for later; one that is damaged is skipped.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(most)
            if not data.endswith(b"\n"):
                data += file.readline()
    except FileNotFoundError:
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    lines = complete.decode("utf-8", errors="replace").split("\n")
    return [row for line in lines if (row := parse_row(line)) is not None], offset + len(complete)


def last_steps(path: Path) -> dict[str, int]:
    """Return the last step of each name in a file."""
    steps: dict[str, int] = {}
    offset = -1
    after = 0
    while after != offset:
        offset = after
        rows, after = read_rows(path, offset)
        for _ in fresh(rows, steps):
            pass
    return steps
