"""``freetrain replay --site …``: the options of a replay of several sites, its files and its output."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.options import known_name
from freetrain_parsl.errors import InvalidInput, InvalidSettings, did_you_mean
from freetrain_parsl.extensions.globus.sites.planning.model import SitesSettings, TransferRate
from freetrain_parsl.extensions.replay.holes import numbered_lines
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.sites.comparison import SiteTerms
from freetrain_parsl.extensions.replay.sites.logs import LogPart, SiteLog
from freetrain_parsl.extensions.replay.terminal import site_heading, site_summary, site_table
from freetrain_parsl.screen import say

__all__ = [
    "TRANSFER_HEADER",
    "SiteOption",
    "number_or_nan",
    "open_sites",
    "read_site_options",
    "read_transfer_rates",
    "refuse_beside_sites",
    "same_rate",
    "show_sites",
    "site_terms",
]

TRANSFER_HEADER = "from,to,megabytes_per_second,latency"
_MEGABYTE = 1e6
_LATENCY = 10.0  # seconds: of a transfer service that is asked now and then whether the task has ended
_KEYS = ("nodes", "processors-per-node", "partition", "from", "hours")
_RATE, _STATE = 100.0, 1000.0  # MB/s, MB


def same_rate(sites: Sequence[str], megabytes_per_second: float) -> dict[tuple[str, str], TransferRate]:
    """Return the same rate between all pairs of sites, with a latency of 10 s."""
    rate = TransferRate(megabytes_per_second * _MEGABYTE, _LATENCY)
    return dict.fromkeys(permutations(sites, 2), rate)


def read_transfer_rates(path: Path, sites: Sequence[str]) -> dict[tuple[str, str], TransferRate]:
    """Read the rates between sites; pairs that are missing have none.

    Lines that begin with ``#`` are comments, and a latency may be missing (10 s).

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
    megabytes, latency = number_or_nan(fields[2]), number_or_nan(fields[3]) if len(fields) == 4 else _LATENCY
    if not 0 < megabytes < math.inf:
        raise ValueError(f"a rate must be a positive number of MB/s, got {fields[2]!r}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"a latency must be zero or more seconds, got {fields[3]!r}")
    return (source, target), TransferRate(megabytes * _MEGABYTE, latency)


def _fields(text: str) -> list[str]:
    return [field.strip() for field in text.split(",")]


def number_or_nan(text: str) -> float:
    """Parse a number; return NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class SiteOption:
    """A site as given on the command line, ``NAME=LOG[,KEY=VALUE…]``; `after` and `hours` select a part of the log."""

    name: str
    log: Path
    nodes: int | None = None
    processors_per_node: int | None = None
    partition: str | None = None
    after: float = 0.0
    hours: float | None = None


def read_site_options(texts: Sequence[str]) -> tuple[SiteOption, ...]:
    """Parse the values of ``--site``.

    Raises
    ------
    InvalidSettings
        One is malformed, or a name is given twice.
    """
    sites = tuple(map(_site_option, texts))
    names = [site.name for site in sites]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidSettings(f"--site: two sites are named {min(twice)!r}; give each its own name")
    return sites


def _site_option(text: str) -> SiteOption:
    name, equals, rest = text.partition("=")
    log, *items = rest.split(",")
    if not (equals and log and re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name)):
        raise InvalidSettings(f"--site {text}: give NAME=LOG, as in --site summit=summit.csv.gz,nodes=1024")
    values: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        known_name(f"--site {name}", key, _KEYS)
        if not (equals and value) or key in values:
            raise InvalidSettings(f"--site {name}: give {key}=VALUE once, got {text}")
        values[key] = value
    return SiteOption(
        name,
        Path(log),
        _whole(name, "nodes", values),
        _whole(name, "processors-per-node", values),
        values.get("partition"),
        _hours(name, "from", values) or 0.0,
        _hours(name, "hours", values),
    )


def _whole(site: str, key: str, values: Mapping[str, str]) -> int | None:
    if key not in values:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", values[key]):
        raise InvalidSettings(f"--site {site}: {key} must be a whole number, got {values[key]!r}")
    return int(values[key])


def _hours(site: str, key: str, values: Mapping[str, str]) -> float | None:
    if key not in values:
        return None
    hours = number_or_nan(values[key])
    if not (math.isfinite(hours) and hours >= 0):
        raise InvalidSettings(f"--site {site}: {key} must be a number of hours, got {values[key]!r}")
    return hours


def open_sites(options: Sequence[SiteOption], *, lenient: bool, mask_idle_above: float | None) -> tuple[SiteLog, ...]:
    """Open the logs; see `freetrain_parsl.extensions.replay.logs.logs.open_log`."""
    sites = []
    for one in options:
        log = open_log(
            one.log,
            nodes=one.nodes,
            lenient=lenient,
            processors_per_node=one.processors_per_node,
            partition=one.partition,
            mask_idle_above=mask_idle_above,
        )
        if one.after or one.hours is not None:
            log = LogPart(log, 3600 * one.after, None if one.hours is None else 3600 * one.hours)
        sites.append(SiteLog(one.name, log))
    return tuple(sites)


def site_terms(
    options: Sequence[SiteOption], transfers: str | None, state_size: float | None, look: float | None
) -> SiteTerms:
    """Return what moves take; sizes are in MB, and transfers in MB/s or a file with rates."""
    names = [site.name for site in options]
    size = _STATE if state_size is None else state_size
    if not (math.isfinite(size) and size >= 0):
        raise InvalidSettings(f"--state-size must be zero or more MB, got {size:g}")
    if look is not None and not 1 <= look <= 86_400:
        raise InvalidSettings(f"--look: must be 1 to 86,400 seconds, got {look:g}")
    settings = SitesSettings() if look is None else SitesSettings(look=timedelta(seconds=look))
    return SiteTerms(settings, _rates(names, transfers), size * 1e6)


def _rates(names: Sequence[str], transfers: str | None) -> dict[tuple[str, str], TransferRate]:
    rate = _RATE if transfers is None else number_or_nan(transfers)
    if math.isnan(rate) and transfers is not None:
        return read_transfer_rates(Path(transfers), names)
    if not 0 < rate < math.inf:
        raise InvalidSettings(f"--transfers {transfers}: give a positive number of MB/s, or a file with rates")
    return same_rate(names, rate)


def refuse_beside_sites(given: Mapping[str, object]) -> None:
    """Reject options that are about one log; `given` are their values, ``None`` or false if absent."""
    reasons = {
        "LOG": "give each log with its site, --site NAME=LOG",
        "--nodes": "give it with its site, --site NAME=LOG,nodes=N",
        "--processors-per-node": "give it with its site, --site NAME=LOG,processors-per-node=N",
        "--partition": "give it with its site, --site NAME=LOG,partition=NAME",
        "--fusion": "sweeps do not work with --site",
        "--what-if": "does not work with --site; use --rescale-seconds and --start-seconds",
    }
    for option, reason in reasons.items():
        if given[option]:
            raise InvalidSettings(f"{option}: {reason}")


def show_sites(result: Mapping[str, Any]) -> None:
    """Print the figures."""
    console = Screen(highlight=False)
    console.print(site_heading(result))
    console.print()
    console.print(site_table(result))
    console.print()
    console.print(site_summary(result))
    for note in result["notes"]:
        console.print(f"Note: {note}")
    for way in result["ways"]:
        if way["refused"]:
            what = way["site"] or way["way"]
            say(
                f"freetrain: warning: policy {result['policy']!r}, {what}: {way['refused']:,} decisions refused, the "
                "last good allocation was kept",
                err=True,
            )
