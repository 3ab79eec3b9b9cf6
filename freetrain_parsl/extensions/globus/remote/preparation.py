"""Check a campaign and a site file here, before anything is sent, and make the request that starts it there."""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.site import Site, shipped_sites
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote.archive import Archive, pack
from freetrain_parsl.extensions.globus.remote.collection import collect
from freetrain_parsl.extensions.globus.remote.messages import Versions
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PackedCampaign", "Preparation", "UnknownVariables", "pack_campaign", "prepare", "prepare_packed"]

_NO_WORD = re.compile(r"[^A-Za-z0-9]+")
_LONGEST_NAME = 60
_NO_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class UnknownVariables(Variables):
    """Values of a site file's variables: those without one given here are looked up at the site, not here.

    Attributes
    ----------
    unknown : set of str
        Those without one.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__(given, environment={})
        self.unknown: set[str] = set()

    def value(self, name: str, default: str | None) -> str | None:
        """Look up a variable, and note it if it has no value."""
        value = super().value(name, default)
        if value is None:
            self.unknown.add(name)
        return value


@dataclass(frozen=True)
class PackedCampaign:
    """A campaign that has been checked and packed, for any number of sites.

    Parameters
    ----------
    campaign
        As it was read.
    settings
        Values of ``${NAME}``, each ``name=value``.
    archive
        Its files.
    encoded
        The archive as it is sent, in Base64.
    left_out
        Python files that stay here because their names look like secrets.
    versions
        Of the software here.
    """

    campaign: Campaign
    settings: tuple[str, ...]
    archive: Archive = field(repr=False)
    encoded: str = field(repr=False)
    left_out: tuple[str, ...]
    versions: Mapping[str, Any]

    @property
    def given(self) -> dict[str, str]:
        """The settings by name."""
        return _by_name(self.settings)


@dataclass(frozen=True)
class Preparation:
    """A campaign that is ready to be sent to a site: the name of the run, and the call that starts it."""

    run: str
    packed: PackedCampaign
    request: Mapping[str, Any] = field(repr=False)


def pack_campaign(campaign: Path, *, settings: Sequence[str] = (), include: Sequence[Path] = ()) -> PackedCampaign:
    """Check a campaign, and pack it; see `prepare`.

    Raises
    ------
    InvalidInput
        A file is invalid, or cannot travel.
    """
    Variables.parse(settings)  # refuses what is no setting
    own = Variables(_by_name(settings), environment={})
    collection = collect(campaign, own, include)
    archive = pack(collection.files, collection.campaign)
    return PackedCampaign(
        Campaign.load(campaign, own),
        tuple(settings),
        archive,
        base64.b64encode(archive.data).decode(),
        collection.left_out,
        Versions.installed().as_json(),
    )


def prepare(
    campaign: Path,
    site: str,
    *,
    settings: Sequence[str] = (),
    include: Sequence[Path] = (),
    any_versions: bool = False,
) -> Preparation:
    """Check a campaign and a site file, and pack the campaign; the parameters are those of `RemoteCampaign.start`.

    The campaign's variables all need a value in `settings`, each ``name=value``; those of the site file that have none
    are looked up in the environment of the endpoint. The name of the run is the campaign's with a random end by
    default.

    Raises
    ------
    InvalidInput
        A file is invalid, or cannot travel.
    """
    packed = pack_campaign(campaign, settings=settings, include=include)
    return prepare_packed(packed, site, any_versions=any_versions)


def prepare_packed(
    packed: PackedCampaign, site: str, *, any_versions: bool = False, run: str | None = None
) -> Preparation:
    """Check a site file, and make the request for a packed campaign, and a run of this name; see `prepare`.

    Raises
    ------
    InvalidInput
        The site file is invalid, or a setting is not used.
    """
    given, loaded = packed.given, packed.campaign
    document, complete = _site(site, given)
    unused = {name.upper() for name in given} - {name.upper() for name in (*loaded.variables, *complete)}
    if unused:
        name = min(unused)
        raise InvalidInput(f"--set {name.lower()}=…: neither the campaign nor the site file has ${{{name}}}")
    name = run or f"{_NO_WORD.sub('-', loaded.name).strip('-')[:_LONGEST_NAME] or 'run'}-{secrets.token_hex(4)}"
    request = {
        "verb": "start",
        "run": name,
        "versions": packed.versions,
        "any_versions": any_versions,
        "settings": list(packed.settings),
        "site": document,
        "sha256": packed.archive.sha256,
        "archive": packed.encoded,
    }
    return Preparation(name, packed, request)


def _site(site: str, given: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Return what is sent of the site file, and the names of its variables that were looked up."""
    variables = UnknownVariables(given)
    document = {"name": site}
    shipped = not Path(site).exists() and site in shipped_sites()
    file = shipped_sites()[site] if shipped else Path(site)
    text = read_text(file, "site file")
    try:
        Site.parse(text, str(file), variables)
    except InvalidInput:
        if not variables.unknown:  # otherwise the site checks it, with its own values
            raise
        # The search ended at the first variable without a value.
        return ({"name": site} if shipped else {"file": _name_there(file), "text": text}), _names_in(text)
    if not shipped:
        document = {"file": _name_there(file), "text": text}
    return document, set(variables.used)


def _name_there(file: Path) -> str:
    """Return the name of a site file at the site, which accepts only plain ones."""
    return _NO_FILE_NAME.sub("-", file.name)[-_LONGEST_NAME:].lstrip("._-") or "site.yaml"


def _names_in(text: str) -> set[str]:
    return set(re.findall(r"\$\{([A-Za-z_][A-Za-z0-9_]*)", text))


def _by_name(settings: Sequence[str]) -> dict[str, str]:
    return dict(setting.partition("=")[::2] for setting in settings)
