"""The values of a training job in a CSV file: one line for each value."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.executor.values.tracker import Outcome, Row, TrackedTraining

__all__ = ["CsvTracker", "name_in"]

_HEADER = ["step", "time", "name", "value"]


def name_in(directory: Path, training: TrackedTraining) -> str:
    """Return a training job's name in a directory, with its id if the name belongs to another training job there.

    This other one may be of another campaign, or the same one before it started over with other code.
    """
    owner = directory / f".{training.name}.id"
    try:
        with os.fdopen(os.open(owner, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(training.id)
    except FileExistsError:
        if owner.read_text(encoding="ascii", errors="replace") != training.id:
            return f"{training.name}-{training.id}"
    return training.name


@dataclass
class CsvTracker:
    """Writes ``NAME.csv`` with the columns step, time (seconds since the epoch), name and value.

    Parameters
    ----------
    directory
        Where, as ``NAME-ID.csv`` if another training job of this name has been there; ``None``: in the training job's
        own directory.
    """

    options: ClassVar = ("directory",)
    directory: str | None = None

    def open(self, training: TrackedTraining) -> Mapping[str, int]:
        """See `Tracker.open`; a record that is not complete is removed."""
        directory = training.directory if self.directory is None else Path(self.directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = training.name if self.directory is None else name_in(directory, training)
        path = directory / f"{name}.csv"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        with os.fdopen(descriptor, "rb+") as file:
            file.truncate(_length_of_records(file))
        self._file: IO[str] = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        steps: dict[str, int] = {}
        with path.open(newline="", encoding="utf-8") as lines:
            for line in csv.DictReader(lines):
                steps[line["name"]] = max(int(line["step"]), steps.get(line["name"], 0))
        if not self._file.tell():
            self._writer.writerow(_HEADER)
        return steps

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`."""
        for row in rows:
            self._writer.writerows([row.step, f"{row.time:.3f}", name, value] for name, value in row.values.items())
        self._file.flush()

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002 - a file has no state
        """See `Tracker.close`."""
        self._file.close()


def _length_of_records(file: BinaryIO) -> int:
    """Return the length of the complete records, in bytes: a line feed ends one unless it is between quotes."""
    length = position = quotes = 0
    for line in file:
        position += len(line)
        quotes += line.count(b'"')
        if line.endswith(b"\n") and quotes % 2 == 0:
            length = position
    return length
