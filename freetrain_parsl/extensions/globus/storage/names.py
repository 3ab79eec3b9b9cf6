"""The directory ``owners`` on home: who owns which training job, told by the names of its entries alone.

One listing shows everything::

    resnet.gen-0000000003               the claim of generation 3; creating it fails if it exists
    resnet.gen-0000000003.by-1f0c29aa   the driver that made this claim
    resnet.gen-0000000003.released      that driver no longer uses it
    driver-1f0c29aa.beat-0000000042     renewed by renaming while the driver lives

Training jobs appear under their directory names (`freetrain_parsl.storage.posix.directory_name`). Whoever can write
there can create any entry, so a name counts only if a driver could have made it: it becomes part of paths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

__all__ = [
    "CHECKPOINTS",
    "LAST_NUMBER",
    "OWNERS",
    "OwnerClaim",
    "OwnersListing",
    "OwnersMemory",
    "beat_name",
    "claim_name",
    "generation_name",
    "generation_of",
    "is_training_name",
]

OWNERS = "owners"
CHECKPOINTS = "checkpoints"
"""Directories on home; below the second: training, generation, checkpoint."""

LAST_NUMBER = 9_999_999_999
"""The largest number of a generation or a heartbeat that a name can hold."""

_TRAINING = r"(?!\.)[A-Za-z0-9_.~%-]{1,200}"
_CLAIM = re.compile(
    rf"(?P<training>{_TRAINING})\.gen-(?P<number>[0-9]{{10}})"
    r"(?:\.(?:by-(?P<driver>[0-9a-f]{1,64})|(?P<released>released)))?"
)
_BEAT = re.compile(r"driver-(?P<driver>[0-9a-f]{1,64})\.beat-(?P<number>[0-9]{10})")
_GENERATION = re.compile(r"gen-([0-9]{10})")


def is_training_name(name: str) -> bool:
    """Return whether this can be the directory name of a training job."""
    return re.fullmatch(_TRAINING, name) is not None


def generation_name(generation: int) -> str:
    """Return the name of a generation's directory below ``checkpoints/<training>``."""
    return f"gen-{generation:010d}"


def generation_of(name: str) -> int | None:
    """Return the generation of which this is the directory."""
    match = _GENERATION.fullmatch(name)
    return int(match[1]) if match else None


def claim_name(training: str, generation: int, suffix: str = "") -> str:
    """Return the name of a claim, or of an entry that belongs to it: ``by-<driver>`` or ``released``."""
    return f"{training}.{generation_name(generation)}{f'.{suffix}' if suffix else ''}"


def beat_name(driver: str, number: int) -> str:
    """Return the name of a driver's heartbeat."""
    return f"driver-{driver}.beat-{number:010d}"


@dataclass
class OwnerClaim:
    """The claim of one generation of a training job.

    Parameters
    ----------
    generation
        Its number.
    drivers
        Those that have put their name to it: one, or none if its driver died in between or has not yet.
    released
        Whether its driver no longer uses it.
    """

    generation: int
    drivers: set[str] = field(default_factory=set)
    released: bool = False


@dataclass(frozen=True)
class OwnersListing:
    """What a listing of ``owners`` says.

    Parameters
    ----------
    claims
        Training -> its newest claim.
    beats
        Driver -> number of its last heartbeat.
    """

    claims: Mapping[str, OwnerClaim]
    beats: Mapping[str, int]

    @classmethod
    def parse(cls, names: Iterable[str]) -> OwnersListing:
        """Read a listing; other names are ignored."""
        claims: dict[str, OwnerClaim] = {}
        beats: dict[str, int] = {}
        for name in names:
            if match := _BEAT.fullmatch(name):
                beats[match["driver"]] = max(int(match["number"]), beats.get(match["driver"], 0))
            elif match := _CLAIM.fullmatch(name):
                number = int(match["number"])
                claim = claims.get(match["training"])
                if claim is None or number > claim.generation:
                    claim = claims[match["training"]] = OwnerClaim(number)
                if number == claim.generation:
                    claim.drivers |= {match["driver"]} if match["driver"] else set()
                    claim.released |= match["released"] is not None
        return cls(claims, beats)


_MOST_DRIVERS = 100  # of a claim, which has one
_RELEASED = "released"  # among the names of drivers, which are hexadecimal


class OwnersMemory:
    """The newest claims of some training jobs, and the heartbeats of their drivers, over several listings.

    Parameters
    ----------
    keep
        Seconds for which an entry counts after it was shown last.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._claims: dict[tuple[str, int], dict[str, float]] = {}  # -> driver, "" for the claim -> when shown last
        self._beats: dict[tuple[str, int], float] = {}  # -> when shown last
        self._since: dict[Hashable, tuple[int, float]] = {}  # number of a claim or heartbeat, and when it was new

    def take_in(self, listing: OwnersListing, now: float, trainings: Collection[str], driver: str) -> OwnersListing:
        """Return what is known after a listing that has arrived now.

        Only `trainings`, and the drivers that have claimed them, matter to this `driver`; nothing else is remembered.
        """
        for training, claim in listing.claims.items():
            if training in trainings:
                shown = self._claims.setdefault((training, claim.generation), {})
                names = sorted(claim.drivers)[:_MOST_DRIVERS] + sorted(claim.drivers & {driver})
                shown |= dict.fromkeys(["", *names, *([_RELEASED] if claim.released else [])], now)
        self._claims = {
            key: kept
            for key, shown in self._claims.items()
            if key[0] in trainings and (kept := {name: at for name, at in shown.items() if now - at < self._keep})
        }
        claims: dict[str, OwnerClaim] = {}
        for (training, generation), shown in sorted(self._claims.items()):
            claims[training] = OwnerClaim(generation, set(shown) - {"", _RELEASED}, _RELEASED in shown)
        drivers = {driver}.union(*(claim.drivers for claim in claims.values()))
        self._beats |= {(name, number): now for name, number in listing.beats.items() if name in drivers}
        self._beats = {key: at for key, at in self._beats.items() if key[0] in drivers and now - at < self._keep}
        beats = dict(sorted(self._beats))  # the highest number of each driver
        current: dict[Hashable, int] = {("driver", name): beats.get(name, 0) for name in drivers}
        current |= {("claim", name): claim.generation for name, claim in claims.items()}
        self._since = {
            key: self._since[key] if key in self._since and self._since[key][0] == value else (value, now)
            for key, value in current.items()
        }
        return OwnersListing(claims, beats)

    def unchanged_since(self, kind: str, name: str) -> float:
        """Return since when a claim, or a driver's heartbeat, has been known as it is now."""
        return self._since[kind, name][1]
