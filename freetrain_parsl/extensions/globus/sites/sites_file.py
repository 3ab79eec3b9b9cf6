"""The list of sites of a campaign, read from a YAML file and validated before anything is sent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.files.yaml_file import Section, Variables, user_path
from freetrain_parsl.campaign.site.site import Site, shipped_sites
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint
from freetrain_parsl.extensions.globus.remote.preparation import UnknownVariables
from freetrain_parsl.extensions.globus.sites.planning.model import ASSUMED, HOME, SiteRates, SitesSettings, TransferRate
from freetrain_parsl.extensions.globus.storage.home import GlobusHome
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SiteEntry", "SitesFile"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}"
_MEGABYTE = 1e6
_LEAST_PERIOD = 1.0  # seconds
_STATUS = 60.0  # seconds


@dataclass(frozen=True)
class SiteEntry:
    """One site of the list.

    Parameters
    ----------
    name
        Its name.
    endpoint
        UUID of its endpoint of Globus Compute; empty: this machine.
    config
        Its site file, or the name of a shipped one.
    rates
        Stated rates, which hold until copies are measured.
    where
        File and line, for messages.
    """

    name: str
    endpoint: str
    config: str
    rates: SiteRates
    where: str


@dataclass(frozen=True)
class SitesFile:
    """A validated list of sites.

    Parameters
    ----------
    file, text
        As given.
    variables
        Values of ``${NAME}`` in it.
    sites
        In file order.
    settings
        How training jobs are moved.
    status_period
        Seconds between questions for the progress.
    """

    file: str
    text: str = field(repr=False)
    variables: Mapping[str, str]
    sites: tuple[SiteEntry, ...]
    settings: SitesSettings
    status_period: float

    @classmethod
    def load(cls, path: Path, settings: Mapping[str, str] | None = None) -> SitesFile:
        """Read a list of sites, and check the site files in it.

        Parameters
        ----------
        path
            The file; paths in it are relative to its directory.
        settings
            Values of ``${NAME}`` in it and in the site files.

        Raises
        ------
        InvalidInput
            A value is invalid, or a site has no home or another one; the message gives file and line.
        """
        return cls.parse(read_text(path, "list of sites"), str(path), path.absolute().parent, settings or {})

    @classmethod
    def parse(cls, text: str, file: str, directory: Path, settings: Mapping[str, str]) -> SitesFile:
        """Parse the text of a file from `directory`."""
        variables = Variables(settings)
        top = Section.parse(text, file, variables)
        status = top.duration("status", positive=True)
        planned = top.checked(SitesSettings, **top.fields_of(SitesSettings, positive=True, without=("time_limit",)))
        period = planned.look.total_seconds()
        status_period = min(_STATUS, period) if status is None else status.total_seconds()
        for key, seconds in (("look", period), ("status", status_period)):
            if seconds < _LEAST_PERIOD:
                raise top.refusal(f"must be at least {_LEAST_PERIOD:.0f} s: each is a call to every site", key)
        sections = top.sections("sites")
        top.done()
        if not sections:
            raise top.refusal("there are no 'sites'; list at least one: '- {name: polaris, config: polaris.yaml}'")
        entries: dict[str, SiteEntry] = {}
        homes: dict[tuple[str, float], str] = {}
        directories: dict[str, str] = {}
        for section in sections:
            entry = _read_entry(section, directory)
            if entry.name in entries:
                raise section.refusal(f"two sites are named {entry.name!r}; give each its own name", "name")
            entries[entry.name] = entry
            site = section.checked(_site_of, entry.config, settings, key="config")
            if site is None:
                continue  # it needs values that only the site has; it checks itself
            if not isinstance(site.home, GlobusHome):
                raise section.refusal(
                    f"{site.file} has no checkpoints.globus; training jobs move between sites through a home on Globus",
                    "config",
                )
            places = site.home.settings
            if (other := directories.setdefault(str(places.local), entry.name)) != entry.name:
                raise section.refusal(
                    f"its checkpoint directory is that of {other!r}, {places.local}; give each site its own",
                    "config",
                )
            homes.setdefault((str(places.home), places.lease.total_seconds()), entry.name)
            if len(homes) > 1:
                (home, lease), (other, other_lease) = homes
                raise section.refusal(
                    f"its home is {other} with a lease of {other_lease:.0f} s, that of {homes[home, lease]!r} is "
                    f"{home} with {lease:.0f} s; all sites need the same",
                    "config",
                )
        return cls(file, text, dict(variables.used), tuple(entries.values()), planned, status_period)


def _read_entry(section: Section, directory: Path) -> SiteEntry:
    name = section.required("name", "polaris")
    if not re.fullmatch(_NAME, name) or name == HOME:
        raise section.refusal(
            f"must be up to 31 letters, digits, '_' and '-', and not {HOME!r}, got {name[:80]!r}", "name"
        )
    endpoint = section.text("endpoint") or ""
    if endpoint:
        try:
            endpoint = ComputeEndpoint(endpoint).id
        except InvalidInput as error:
            raise section.refusal(f"site {name}: {error}", "endpoint") from None
    config = section.required("config", "polaris.yaml")
    path = section.checked(user_path, config, key="config")
    if config not in shipped_sites() or (directory / path).exists():
        config = str(directory / path)
    rates = SiteRates(_read_rate(section, "to_home"), _read_rate(section, "from_home"))
    entry = SiteEntry(name, endpoint, config, rates, section.where())
    section.done()
    return entry


def _read_rate(section: Section, key: str) -> TransferRate:
    keys = section.section(key)
    speed, latency = keys.number("megabytes_per_second", positive=True), keys.duration("latency")
    keys.done()
    return TransferRate(
        ASSUMED.bytes_per_second if speed is None else speed * _MEGABYTE,
        ASSUMED.latency if latency is None else latency.total_seconds(),
    )


def _site_of(config: str, settings: Mapping[str, str]) -> Site | None:
    """Return the site; ``None`` if its file needs values that are looked up at the site."""
    variables = UnknownVariables(settings)
    try:
        return Site.load(config, variables)
    except InvalidInput:
        if variables.unknown:
            return None
        raise
