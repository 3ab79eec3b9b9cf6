"""Reader of measured transfer rates between sites: CSV with the header ``from,to,megabytes_per_second,latency``."""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.planning.sites.model import TransferRate
from freetrain_parsl.replay.holes import numbered_lines

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
    header = False
    for number, text in numbered_lines(path):
        where = f"{path}:{number}"
        fields = [field.strip() for field in text.split(",")]
        if text.startswith("#"):
            continue
        if not header:
            if ",".join(fields).lower() != TRANSFER_HEADER:
                raise InvalidInput(f"{where}: the first line must be {TRANSFER_HEADER!r}, got {text[:80]!r}")
            header = True
            continue
        if len(fields) == 3:
            fields.append(f"{_LATENCY}")
        if len(fields) != 4:
            raise InvalidInput(f"{where}: expected {TRANSFER_HEADER!r}, got {text[:80]!r}")
        for name in fields[:2]:
            if name not in sites:
                raise InvalidInput(f"{where}: no site {name!r}{did_you_mean(name, sites)}; sites: {', '.join(sites)}")
        pair = fields[0], fields[1]
        if pair[0] == pair[1]:
            raise InvalidInput(f"{where}: a rate is from one site to another, got {pair[0]!r} twice")
        if pair in rates:
            raise InvalidInput(f"{where}: a second rate from {pair[0]!r} to {pair[1]!r}; keep one")
        megabytes, latency = _number(fields[2]), _number(fields[3])
        if not (math.isfinite(megabytes) and megabytes > 0):
            raise InvalidInput(f"{where}: a rate must be a positive number of MB/s, got {fields[2]!r}")
        if not (math.isfinite(latency) and latency >= 0):
            raise InvalidInput(f"{where}: a latency must be zero or more seconds, got {fields[3]!r}")
        rates[pair] = TransferRate(megabytes * _MEGABYTE, latency)
    if not rates:
        raise InvalidInput(f"{path}: contains no rates; each line is '{TRANSFER_HEADER}'")
    return rates


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
