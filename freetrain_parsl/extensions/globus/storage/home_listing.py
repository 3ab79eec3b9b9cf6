"""Listings of home: who has claimed which training, and which of its checkpoints are whole.

A listing may be stale, incomplete or of something else, and whoever can write at home can create any entry. So names
count only if a driver could have made them, and nothing follows from what is *not* listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.globus.storage.mover.carrier import Parcel
from freetrain_parsl.extensions.globus.storage.names import (
    CHECKPOINTS,
    OWNERS,
    OwnersListing,
    generation_name,
    generation_of,
)
from freetrain_parsl.storage.entry import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from freetrain_parsl.extensions.globus.storage.collections import Collections
    from freetrain_parsl.extensions.globus.storage.names import OwnerClaim
    from freetrain_parsl.extensions.globus.storage.places import CollectionPath

__all__ = ["HomeCheckpoints", "difference_at_home", "list_home", "newest_claims", "search_home"]

_ENOUGH = 8
"""Whole checkpoints after which a search ends: more damaged ones in a row are not expected."""
_LATER = 20
"""Generations after the owned one that are looked at: nobody should have made any."""


def newest_claims(collections: Collections, home: CollectionPath) -> Mapping[str, OwnerClaim]:
    """Return the newest claim of each training, by its directory name."""
    return OwnersListing.parse(collections.names(home.collection, home.join(OWNERS)) or []).claims


@dataclass
class HomeCheckpoints:
    """Checkpoints of a training that home lists.

    Parameters
    ----------
    whole, partial
        Those with a manifest, and those without.
    """

    whole: set[Parcel] = field(default_factory=set)
    partial: set[Parcel] = field(default_factory=set)

    @property
    def ordered(self) -> list[Parcel]:
        """The whole ones, oldest first."""
        return sorted(self.whole, key=lambda parcel: parcel.order)


def list_home(collections: Collections, home: CollectionPath, training: str) -> HomeCheckpoints:
    """List the checkpoints of a training at home, all of them."""
    found = HomeCheckpoints()
    for _ in _search(collections, home, training, found, _generations(collections, home, training)):
        pass
    return found


def search_home(
    collections: Collections, home: CollectionPath, training: str, generation: int, found: HomeCheckpoints
) -> Iterator[None]:
    """Look for the newest checkpoints of a training at home, one request at a time.

    Parameters
    ----------
    collections
        Requests.
    home
        The place.
    training
        Its directory name.
    generation
        The owned one: a few later ones are looked at, and earlier ones until enough whole checkpoints are found.
    found
        Filled.

    Yields
    ------
    None
        After each request. A hostile home can list any number of entries, so the caller does other things in between.

    Raises
    ------
    CollectionUnavailable, GlobusRefused
        A directory cannot be listed.
    """
    numbers = _generations(collections, home, training)
    yield
    later = sorted(number for number in numbers if number > generation)[:_LATER]
    earlier = [number for number in numbers if number <= generation]
    yield from _search(collections, home, training, found, later)
    if not found.whole:
        yield from _search(collections, home, training, found, earlier, _ENOUGH)


def _generations(collections: Collections, home: CollectionPath, training: str) -> list[int]:
    """Return the generations that have a directory, newest first."""
    names = collections.names(home.collection, home.join(CHECKPOINTS, training), directories=True) or []
    return sorted({number for name in names if (number := generation_of(name)) is not None}, reverse=True)


def _search(
    collections: Collections,
    home: CollectionPath,
    training: str,
    found: HomeCheckpoints,
    generations: list[int],
    enough: int | None = None,
) -> Iterator[None]:
    for generation in generations:
        place = home.join(CHECKPOINTS, training, generation_name(generation))
        names = collections.names(home.collection, place, directories=True) or []
        yield
        parcels = {parcel for name in names if (parcel := Parcel(training, generation, name)).is_checkpoint}
        for parcel in sorted(parcels, key=lambda parcel: parcel.order, reverse=True):
            files = collections.names(home.collection, home.join(CHECKPOINTS, *parcel.path)) or []
            (found.whole if MANIFEST in files else found.partial).add(parcel)
            yield
            if enough is not None and len(found.whole) >= enough:
                return


def difference_at_home(collections: Collections, home: CollectionPath, parcel: Parcel, sizes: Mapping[str, int]) -> str:
    """Compare a checkpoint that was sent with what home lists.

    Parameters
    ----------
    collections
        Requests.
    home
        The place.
    parcel
        The checkpoint.
    sizes
        File, below its directory -> bytes.

    Returns
    -------
    fault
        The first difference; empty if all files are listed with their sizes.
    """
    folders: dict[str, dict[str, int | None]] = {}
    for name in sizes:
        folder, _, _ = name.rpartition("/")
        if folder not in folders:
            place = home.join(CHECKPOINTS, *parcel.path, *filter(None, [folder]))
            folders[folder] = collections.sizes(home.collection, place) or {}
    for name, size in sizes.items():
        folder, _, file = name.rpartition("/")
        if file not in folders[folder]:
            return f"home does not list {file} of {parcel.name}, which was sent"
        shown = folders[folder][file]
        if shown != size:
            return f"home lists {file} of {parcel.name} with {shown} bytes instead of {size}"
    return ""
