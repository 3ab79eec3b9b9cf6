"""Reader of measured transfer rates between sites: CSV with the header ``from,to,megabytes_per_second,latency``."""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.extensions.globus.sites.planning.model import TransferRate
from freetrain_parsl.extensions.replay.holes import numbered_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["TRANSFER_HEADER", "read_transfer_rates", "same_rate"]

TRANSFER_HEADER = "from,to,megabytes_per_second,latency"
_MEGABYTE = 1e6
_LATENCY = 10.0  # seconds: of a transfer service that is asked now and then whether the task has ended


def same_rate(sites: Sequence[str], megabytes_per_second: float) -> dict[tuple[str, str], TransferRate]:
    """Return the same rate between all pairs of sites, with a latency of 10 s."""
    rate = TransferRate(megabytes_per_second * _MEGABYTE, _LATENCY)
    return dict.fromkeys(permutations(sites, 2), rate)


def read_transfer_rates(path: Path, sites: Sequence[str]) -> dict[tuple[str, str], TransferRate]:
    """Read the rates between sites; pairs that are missing have none.

    Parameters
    ----------
    path
        The file; lines that begin with ``#`` are comments, and a latency may be missing (10 s).
    sites
        The sites' names.

    Raises
    ------
    InvalidInput
        The file cannot be read, or a line is malformed, names another site, or repeats a pair; with file and line.
    """
    rates: dict[tuple[str, str], TransferRate] = {}
    lines = [(number, text) for number, text in numbered_lines(path) if not text.startswith("#")]
    if lines and _fields(lines[0][1].lower()) != _fields(TRANSFER_HEADER):
        raise InvalidInput(
            f"{path}:{lines[0][0]}: the first line must be {TRANSFER_HEADER!r}, got {lines[0][1][:80]!r}"
        )
    for number, text in lines[1:]:
        try:
            pair, rate = _rate(text, sites)
        except ValueError as error:
            raise InvalidInput(f"{path}:{number}: {error}") from None
        if pair in rates:
            raise InvalidInput(f"{path}:{number}: a second rate from {pair[0]!r} to {pair[1]!r}; keep one")
        rates[pair] = rate
    if not rates:
        raise InvalidInput(f"{path}: contains no rates; each line is '{TRANSFER_HEADER}'")
    return rates


def _rate(text: str, sites: Sequence[str]) -> tuple[tuple[str, str], TransferRate]:
    """Parse a line; raise `ValueError` with the problem if it is malformed."""
    fields = _fields(text)
    if len(fields) not in (3, 4):
        raise ValueError(f"expected {TRANSFER_HEADER!r}, got {text[:80]!r}")
    source, target = fields[:2]
    for name in (source, target):
        if name not in sites:
            raise ValueError(f"no site {name!r}{did_you_mean(name, sites)}; sites: {', '.join(sites)}")
    if source == target:
        raise ValueError(f"a rate is from one site to another, got {source!r} twice")
    megabytes, latency = _number(fields[2]), _number(fields[3]) if len(fields) == 4 else _LATENCY
    if not 0 < megabytes < math.inf:
        raise ValueError(f"a rate must be a positive number of MB/s, got {fields[2]!r}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"a latency must be zero or more seconds, got {fields[3]!r}")
    return (source, target), TransferRate(megabytes * _MEGABYTE, latency)


def _fields(text: str) -> list[str]:
    return [field.strip() for field in text.split(",")]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
