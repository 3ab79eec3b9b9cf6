"""Ranking for searches: which configurations go on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mode", "is_usable", "promoted", "ranked"]

Mode: TypeAlias = Literal["min", "max"]
"""Whether the best value is the smallest or the largest."""


def is_usable(value: float | None) -> bool:
    """Return whether a value can be compared: neither missing nor NaN."""
    return value is not None and not math.isnan(value)


def ranked(values: Sequence[float | None], mode: Mode) -> list[int]:
    """Return the positions of the values, best first.

    Equal values keep their order; missing values and NaN are last.

    Parameters
    ----------
    values
        The values; ``None`` for a missing one.
    mode
        Which of them is the best.
    """
    sign = 1.0 if mode == "min" else -1.0

    def rank(position: int) -> tuple[bool, float]:
        value = values[position]
        return (False, sign * value) if value is not None and is_usable(value) else (True, 0.0)

    return sorted(range(len(values)), key=rank)


def promoted(values: Sequence[float | None], mode: Mode, eta: int) -> list[int]:
    """Return the positions of the best ``1 / eta`` of the values, best first, but at least one.

    Missing values and NaN are never among them, so there may be fewer, or none.
    """
    keep = max(1, len(values) // eta)
    return [position for position in ranked(values, mode)[:keep] if is_usable(values[position])]
