"""Types of message fields, with their allowed values.

A field's type is its Python type with a `Limit`. `freetrain_parsl.protocol.codec` checks it when a message is decoded,
so that all other code can rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Count", "Duration", "Integer", "Limit", "Name", "Names", "Number", "Text", "Time", "is_name"]

_LONGEST_NAME = 1024
_LONGEST_TEXT = 1 << 16
_LARGEST_INTEGER = 1 << 53  # exact in JSON and in SQLite
_MOST_NAMES = 32
_LONGEST_TIME = 1e12  # seconds


@dataclass(frozen=True)
class Limit:
    """A restriction of a type.

    Parameters
    ----------
    accepts
        Returns whether a decoded JSON value is allowed.
    """

    accepts: Callable[[Any], bool]


def is_name(value: Any) -> bool:
    """Return whether a value is safe in logs, in the journal and on a terminal: printable, at most 1024 characters."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)  # a lone surrogate cannot be stored


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_INTEGER


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and -_LONGEST_TIME < value < _LONGEST_TIME  # comparisons with NaN are false


def _are_names(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > _MOST_NAMES:
        return False
    return all(map(is_name, value)) and all(map(is_name, value.values()))


Name: TypeAlias = Annotated[str, Limit(is_name)]
"""Printable, at most 1024 characters."""

Text: TypeAlias = Annotated[str, Limit(_is_text)]
"""Any text that can be stored, at most 64 KiB."""

Integer: TypeAlias = Annotated[int, Limit(_is_integer)]
"""Less than 2^53 in magnitude."""

Count: TypeAlias = Annotated[int, Limit(lambda value: _is_integer(value) and value >= 0)]
"""Zero or more."""

Number: TypeAlias = Annotated[float, Limit(_is_number)]
"""Any float, including NaN and infinities."""

Time: TypeAlias = Annotated[float, Limit(_is_time)]
"""Seconds; finite."""

Duration: TypeAlias = Annotated[float, Limit(lambda value: _is_time(value) and value >= 0)]
"""Seconds; finite, zero or more."""

Names: TypeAlias = Annotated[dict[str, str], Limit(_are_names)]
"""A mapping from names to names, with at most 32 entries."""
