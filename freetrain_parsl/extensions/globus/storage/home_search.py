"""Searches home for checkpoints that are later than those of this site, and fetches the newest whole one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.errors import CheckpointError, CollectionUnavailable, GlobusRefused
from freetrain_parsl.extensions.globus.storage.home_listing import HomeCheckpoints, search_home
from freetrain_parsl.extensions.globus.storage.mover.carried_training import CarriedStage, CarriedTraining

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from freetrain_parsl.extensions.globus.storage.collections import Collections
    from freetrain_parsl.extensions.globus.storage.mover.carrier import Carrier, Parcel
    from freetrain_parsl.extensions.globus.storage.mover.mover_directory import MoverDirectory
    from freetrain_parsl.extensions.globus.storage.ownership import Ownership
    from freetrain_parsl.extensions.globus.storage.places import CollectionPath
    from freetrain_parsl.extensions.globus.storage.seen_checkpoints import SeenCheckpoints

logger = logging.getLogger(__name__)

__all__ = ["TOGETHER", "HomeSearch"]

TOGETHER = 10
"""Requests of a search, or looks for what was sent, in one pass: renewals come between."""

_ATTEMPTS = 2  # copies of a checkpoint from home that must be damaged before another one is used


@dataclass
class HomeSearch:
    """The part of the mover that takes claimed trainings from the search to their start; called by its thread.

    Parameters
    ----------
    home, collections
        Where to search, and the requests.
    exchange
        The checkpoints of this site.
    ownership, carrier, seen, carried
        Of the mover; `carried` by directory name.
    lock
        Guards them.
    clock
        Seconds, never stepped.
    longest
        Seconds between requests to home at most, after failures.
    spare
        Called after each request, to keep requests apart.
    arrivals
        Checkpoints that were copied here and are not verified yet.
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

    def search(self) -> None:
        """Go on with the search that has waited longest; one in a pass, so that renewals come between."""
        if (item := self._next()) is not None:
            self._search(item)

    def accept(self) -> None:
        """Verify one of the checkpoints that have arrived; one in a pass, so that renewals come between."""
        if self.arrivals:
            self._arrived(self.arrivals.pop(0))

    def _next(self) -> CarriedTraining | None:
        """Return the training whose search has waited longest: no search is so long that others wait for it."""
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
        """Go on looking for checkpoints at home that are later than those here; then fetch the newest of them."""
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
        except (CollectionUnavailable, GlobusRefused) as error:  # one directory of home does not stop all trainings
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
        logger.warning("training %s: %s", item.name, reason)
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
        logger.warning("training %s: %s; the checkpoint before is used", item.name, error)
        item.reason = f"{parcel.name} of generation {parcel.generation} is not used: {error}"
        if len(item.candidates) > 1 or self.exchange.newest(item.name) is not None:
            item.candidates.pop()
            item.fetching = None
            return
        item.reason += "; no other one is left: remove them from home to start over"
        self.carrier.damaged(parcel, item.reason, now)
