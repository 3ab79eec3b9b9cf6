"""Parse durations and amounts of memory."""

from __future__ import annotations

import re
from datetime import timedelta

from freetrain_parsl.errors import InvalidInput

__all__ = ["parse_duration", "parse_memory"]

_SECONDS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "seconds": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "minutes": 60,
    "h": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86400,
    "day": 86400,
    "days": 86400,
}
_BYTES = {
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_WITH_UNIT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]+)")
_CLOCK = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])")
_LONGEST = timedelta(days=3650)
_MOST_BYTES = 2**60


def parse_duration(text: str) -> timedelta:
    """Parse ``90s``, ``10 min``, ``2 h``, ``1 day``, ``HH:MM:SS`` or ``days-HH:MM:SS``.

    Raises
    ------
    InvalidInput
        The format is invalid, or a unit is missing.
    """
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = float(86400 * days + 3600 * hours + 60 * minutes + seconds)
    elif (match := _WITH_UNIT.fullmatch(text)) and match[2].lower() in _SECONDS:
        total = float(match[1]) * _SECONDS[match[2].lower()]
    else:
        raise InvalidInput(f"a duration must be written like '90s', '10 min', '2 h' or 'HH:MM:SS', got {text[:80]!r}")
    if total > _LONGEST.total_seconds():
        raise InvalidInput(f"a duration may be up to {_LONGEST.days} days, got {text!r}")
    return timedelta(seconds=total)


def parse_memory(text: str) -> int:
    """Parse ``512 GB`` or ``64GiB``, in bytes.

    Raises
    ------
    InvalidInput
        The format is invalid.
    """
    units = {unit.lower(): factor for unit, factor in _BYTES.items()}
    if (match := _WITH_UNIT.fullmatch(text)) and match[2].lower() in units:
        amount = round(float(match[1]) * units[match[2].lower()])
        if amount <= _MOST_BYTES:
            return amount
    raise InvalidInput(f"an amount of memory must be written like '512 GB' or '64 GiB', up to 1 EiB, got {text[:80]!r}")
