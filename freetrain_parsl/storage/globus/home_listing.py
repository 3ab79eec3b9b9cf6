"""Listings of home: who has claimed which training, and which of its checkpoints are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.storage.entry import MANIFEST
from freetrain_parsl.storage.globus.carrier import Parcel
from freetrain_parsl.storage.globus.names import CHECKPOINTS, OWNERS, OwnersListing, generation_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.storage.globus.collections import Collections
    from freetrain_parsl.storage.globus.names import OwnerClaim
    from freetrain_parsl.storage.globus.places import CollectionPath

__all__ = ["list_home", "newest_claims"]


def newest_claims(collections: Collections, home: CollectionPath) -> Mapping[str, OwnerClaim]:
    """Return the newest claim of each training, by its directory name."""
    return OwnersListing.parse(collections.names(home.collection, home.join(OWNERS)) or []).claims


def list_home(
    collections: Collections, home: CollectionPath, training: str, pause: Callable[[], None] = lambda: None
) -> tuple[list[Parcel], list[Parcel]]:
    """List the checkpoints of a training at home.

    Parameters
    ----------
    collections
        Requests.
    home
        The place.
    training
        Its directory name.
    pause
        Called between requests.

    Returns
    -------
    whole, partial
        Those with a manifest, oldest first, and those without.
    """
    whole: list[Parcel] = []
    partial: list[Parcel] = []
    for name in collections.names(home.collection, home.join(CHECKPOINTS, training)) or []:
        pause()
        if (generation := generation_of(name)) is None:
            continue
        for step in collections.names(home.collection, home.join(CHECKPOINTS, training, name)) or []:
            parcel = Parcel(training, generation, step)
            if not parcel.is_checkpoint:
                continue
            pause()
            files = collections.names(home.collection, home.join(CHECKPOINTS, *parcel.path)) or []
            (whole if MANIFEST in files else partial).append(parcel)
    return sorted(whole, key=lambda parcel: parcel.order), partial
