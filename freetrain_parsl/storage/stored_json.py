"""JSON that this package has stored: whatever is in the file, reading it ends in a value or in one kind of error."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["DEEPEST", "is_deep", "parse_stored"]

DEEPEST: Final = 100
"""Containers in one another: whoever reads a value may have less of the stack left than whoever stored it."""


def parse_stored(text: object) -> Any:
    """Return the value of a stored text; a database that was tampered with may hold anything, such as a number.

    Raises
    ------
    ValueError
        It is not JSON, or nested more than `DEEPEST` times.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected a JSON text, got {type(text).__name__}")  # noqa: TRY004 - callers expect one kind
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} times") from None
    if text.count("[") + text.count("{") > DEEPEST and is_deep(value):
        raise ValueError(f"it is nested more than {DEEPEST} times")
    return value


def is_deep(value: object, left: int = DEEPEST) -> bool:
    """Return whether a value of JSON's types is nested more than `left` times."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return not left or any(is_deep(part, left - 1) for part in parts)
