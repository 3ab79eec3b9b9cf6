"""What listings of ``owners`` have shown lately. Pure.

Drivers only add claims, names and releases there, and the numbers of heartbeats only grow. So a listing that leaves
something out, or shows an earlier number, is older than one that did not. An entry is remembered until it has not been
shown for a lease: what nobody has ever made does not last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.extensions.globus.storage.names import OwnerClaim, OwnersListing

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

__all__ = ["OwnersMemory"]

_MOST_DRIVERS = 100  # of a claim, which has one
_RELEASED = "released"  # among the names of drivers, which are hexadecimal


class OwnersMemory:
    """The newest claims of some trainings, and the heartbeats of their drivers, over several listings.

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

        Parameters
        ----------
        listing
            What it shows.
        now
            Seconds.
        trainings, driver
            What matters to this driver, and its own identity; nothing else is remembered.
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
