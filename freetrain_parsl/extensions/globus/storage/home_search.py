"""Searches home for checkpoints that are later than those of this site, and fetches the newest whole one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.errors import CheckpointError, CollectionUnavailable, GlobusRefused
from freetrain_parsl.extensions.globus.storage.carried_training import CarriedStage, CarriedTraining
from freetrain_parsl.extensions.globus.storage.carrier import HomeCheckpoints, Parcel
from freetrain_parsl.extensions.globus.storage.names import (
    CHECKPOINTS,
    OWNERS,
    OwnersListing,
    generation_name,
    generation_of,
)
from freetrain_parsl.storage.entry import MANIFEST

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping

    from freetrain_parsl.extensions.globus.storage.carried_training import SeenCheckpoints
    from freetrain_parsl.extensions.globus.storage.carrier import Carrier
    from freetrain_parsl.extensions.globus.storage.collections import CollectionPath, Collections
    from freetrain_parsl.extensions.globus.storage.mover_directory import MoverDirectory
    from freetrain_parsl.extensions.globus.storage.names import OwnerClaim
    from freetrain_parsl.extensions.globus.storage.ownership import Ownership

__all__ = [
    "TOGETHER",
    "HomeSearch",
    "difference_at_home",
    "list_home",
    "newest_claims",
    "search_home",
]

_ENOUGH = 8
"""Whole checkpoints after which a search ends: more damaged ones in a row are not expected."""
_LATER = 20
"""Generations after the owned one that are looked at: nobody should have made any."""


def newest_claims(collections: Collections, home: CollectionPath) -> Mapping[str, OwnerClaim]:
    """Return the newest claim of each training job, by its directory name."""
    return OwnersListing.parse(collections.names(home.collection, home.join(OWNERS)) or []).claims


def list_home(collections: Collections, home: CollectionPath, training: str) -> HomeCheckpoints:
    """List the checkpoints of a training job at home, all of them."""
    found = HomeCheckpoints()
    for _ in _search(collections, home, training, found, _generations(collections, home, training)):
        pass
    return found


def search_home(
    collections: Collections, home: CollectionPath, training: str, generation: int, found: HomeCheckpoints
) -> Iterator[None]:
    """Look for the newest checkpoints of a training job at home, one request at a time, and add them to `found`.

    A few generations later than the owned one, `generation`, are looked at, and earlier ones until enough whole
    checkpoints are found. A hostile home can list any number of entries, so the caller does other things between two
    requests: this yields after each.

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
    """Compare a checkpoint that was sent, with these bytes in each file, with what home lists.

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


logger = logging.getLogger(__name__)


TOGETHER = 10
"""Requests of a search, or looks for what was sent, in one pass: renewals come between."""

_ATTEMPTS = 2  # copies of a checkpoint from home that must be damaged before another one is used


@dataclass
class HomeSearch:
    """The part of the mover that takes claimed training jobs from the search to their start; called by its thread.

    What it works on is the mover's; `lock` guards it, and `spare` keeps requests apart.
    """

    home: CollectionPath
    collections: Collections
    exchange: MoverDirectory
    ownership: Ownership
    carrier: Carrier
    seen: SeenCheckpoints
    carried: dict[str, CarriedTraining]
    lock: threading.RLock
    clock: Callable[[], float]
    longest: float
    spare: Callable[[], None]
    arrivals: list[Parcel] = field(default_factory=list)
    """Checkpoints that were copied here and are not verified yet."""

    def search(self) -> None:
        """Continue with the search that has waited longest; one in a pass, so that renewals come between."""
        if (item := self._next()) is not None:
            self._search(item)

    def accept(self) -> None:
        """Verify one of the checkpoints that have arrived; one in a pass, so that renewals come between."""
        if self.arrivals:
            self._arrived(self.arrivals.pop(0))

    def _next(self) -> CarriedTraining | None:
        """Return the training job whose search has waited longest: no search is so long that others wait for it."""
        now = self.clock()
        with self.lock:
            due = [
                item
                for name, item in self.carried.items()
                if item.stage is CarriedStage.SEARCHING
                and now >= item.search_at
                and self.ownership.generation(name, now) is not None
            ]
        return min(due, key=lambda item: item.search_at, default=None)

    def _search(self, item: CarriedTraining) -> None:
        """Continue looking for checkpoints at home that are later than those here; then fetch the newest of them."""
        if item.search is None:
            found = HomeCheckpoints()
            item.lineage = self.exchange.generation(item.name)
            steps = search_home(self.collections, self.home, item.name, item.generation, found)
            item.search = steps, found
        steps, found = item.search
        begun = self.clock()
        try:
            for _ in range(TOGETHER):
                next(steps)
                self.spare()
                if self.clock() - begun > self.longest / 4:  # home answers slowly
                    break
            item.search_at = self.clock()
        except StopIteration:
            item.search = None
            self._searched(item, found)
        except (CollectionUnavailable, GlobusRefused) as error:  # one directory of home does not stop all training jobs
            item.search = None
            with self.lock:
                self.carrier.delayed(item.name, str(error), self.clock())
                item.search_at = self.carrier.blocked_until(item.name)
            if isinstance(error, CollectionUnavailable):
                raise

    def _searched(self, item: CarriedTraining, found: HomeCheckpoints) -> None:
        """Choose the candidates; what home has listed once is one of them until it is certainly gone."""
        here = self.exchange.newest(item.name)
        best = (item.lineage, here.step, here.revision) if here is not None else None
        later = [parcel for parcel in found.ordered if best is None or parcel.order > best]
        if later and later[-1].generation > item.generation:
            self._not_the_last(item, later[-1])
            return
        with self.lock:
            self.carrier.found(item.name, found.whole, found.partial)
        candidates = self.seen.candidates(item, later, best, self.clock())
        if candidates is not None:
            item.candidates, item.stage = candidates, CarriedStage.FETCHING

    def _not_the_last(self, item: CarriedTraining, later: Parcel) -> None:
        """Give up a claim that is not the last one: a later owner has sent a checkpoint. The next claim follows it."""
        reason = f"home lists {later.name} of generation {later.generation}, which is later than {item.generation}"
        logger.warning("training job %s: %s", item.name, reason)
        with self.lock:
            self.ownership.follow(item.name, later.generation, self.clock())
            self.carrier.forget(item.name)
            self.carried[item.name] = CarriedTraining(item.name, reason=reason)

    def fetch_next(self, item: CarriedTraining) -> None:
        """Fetch the newest candidate; without one, the checkpoints here are the newest."""
        if self.carrier.fetching(item.name) or any(parcel.training == item.name for parcel in self.arrivals):
            return
        if item.fetching is not None:  # it was not copied: it may never have been there
            item.fetching, item.stage = None, CarriedStage.SEARCHING
            item.search_at = self.carrier.blocked_until(item.name)
            return
        if item.candidates:
            item.fetching = item.candidates[-1]
            self.exchange.expect(item.fetching)
            self.carrier.fetch(item.fetching)
            return
        self.exchange.set_generation(item.name, item.generation)
        self.carrier.searched(item.name)
        item.stage, item.reason = CarriedStage.READY, ""

    def _arrived(self, parcel: Parcel) -> None:
        """Verify a fetched checkpoint; a damaged one is not used, but the one before.

        Reading it takes long, so other threads are not kept waiting.
        """
        item = self.carried[parcel.training]
        if item.stage is not CarriedStage.FETCHING or item.fetching != parcel:
            return
        try:
            self.exchange.accept(parcel)
        except CheckpointError as error:
            with self.lock:
                self._not_accepted(item, parcel, error)
            return
        with self.lock:
            self.carrier.arrived(parcel)
            self.seen.newest[item.name] = parcel
            item.lineage, item.fetching = parcel.generation, None
            item.candidates.clear()

    def _not_accepted(self, item: CarriedTraining, parcel: Parcel, error: CheckpointError) -> None:
        now = self.clock()
        if error.transient:
            self.carrier.damaged(parcel, str(error), now)
            return
        times = item.damaged[parcel] = item.damaged.get(parcel, 0) + 1
        if times < _ATTEMPTS:  # the copy may be to blame
            self.carrier.damaged(parcel, str(error), now)
            return
        logger.warning("training job %s: %s; the checkpoint before is used", item.name, error)
        item.reason = f"{parcel.name} of generation {parcel.generation} is not used: {error}"
        if len(item.candidates) > 1 or self.exchange.newest(item.name) is not None:
            item.candidates.pop()
            item.fetching = None
            return
        item.reason += "; no other one is left: remove them from home to start over"
        self.carrier.damaged(parcel, item.reason, now)
