"""Reading of CSV files with a header, in which every error names the file and the line."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.user_files import open_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["CsvRow", "read_rows"]


@dataclass(frozen=True)
class CsvRow:
    """A line of a file: column -> text."""

    file: Path
    line: int
    values: Mapping[str, str]

    def wrong(self, problem: str) -> InvalidInput:
        """Make the error for this line."""
        return InvalidInput(f"{self.file}:{self.line}: {problem}")

    def text(self, column: str) -> str:
        """Return a text that is not empty."""
        if not (text := self.values[column].strip()):
            raise self.wrong(f"{column!r} is empty")
        return text

    def number(self, column: str, *, positive: bool = False) -> float:
        """Return a finite number of zero or more, or a positive one."""
        text = self.values[column]
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0 or (positive and number == 0):
            raise self.wrong(f"{column!r} must be {'a positive number' if positive else 'zero or more'}, got {text!r}")
        return number

    def count(self, column: str) -> int:
        """Return an integer of at least one."""
        number = self.number(column, positive=True)
        if number != int(number):
            raise self.wrong(f"{column!r} must be an integer, got {self.values[column]!r}")
        return int(number)


def read_rows(file: Path, columns: Sequence[str]) -> Iterator[CsvRow]:
    """Yield the lines of a CSV file after its header, which must contain `columns`.

    Raises
    ------
    InvalidInput
        The file cannot be read, its header lacks a column, or a line has another number of values.
    """
    try:
        with open(file, encoding="utf-8", newline="", opener=open_named) as stream:
            reader = csv.reader(stream, strict=True)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise InvalidInput(f"{file}:1: the header lacks {', '.join(missing)}; expected {','.join(columns)}")
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header):
                    raise InvalidInput(f"{file}:{reader.line_num}: expected {len(header)} values, got {len(values)}")
                yield CsvRow(file, reader.line_num, dict(zip(header, values, strict=True)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{file}: cannot be read: {reason}") from error
