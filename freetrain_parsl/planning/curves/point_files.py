"""Files with the points of a curve: two columns of numbers."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_points"]


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
