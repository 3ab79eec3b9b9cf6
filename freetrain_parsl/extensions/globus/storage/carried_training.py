"""A training job whose checkpoints a driver's mover carries."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.globus.storage.ownership import WATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from freetrain_parsl.extensions.globus.storage.carrier import HomeCheckpoints, Parcel

__all__ = ["CarriedStage", "CarriedTraining", "SeenCheckpoints"]


class CarriedStage(Enum):
    """Where a training job is on its way; see `freetrain_parsl.extensions.globus.storage.mover`."""

    CLAIMING = "claiming"
    SEARCHING = "searching"
    FETCHING = "fetching"
    READY = "ready"
    FINISHED = "finished"
    OVER = "over"


@dataclass
class CarriedTraining:
    """A training job of this driver.

    Parameters
    ----------
    name
        Its directory name.
    stage
        Where it is on its way.
    generation
        The one that is owned.
    lineage
        Checkpoints of this and later generations at home continue those here.
    search
        The search of home under way: its steps, each a request, and what they have found.
    search_at
        When home is searched next.
    waits_since
        Since when a checkpoint that home has listed is neither listed nor fetched, or home lists none at all.
    fetching
        The candidate that was asked for.
    damaged
        Candidates that have arrived damaged, and how often.
    candidates
        Checkpoints at home that are later than those here, oldest first.
    reason
        Why it is not ready.
    finished
        When it finished.
    confirmed
        Whether its result counts.
    scanned
        Whether its last checkpoint has been looked for.
    leaving
        Whether it continues at another site; its last checkpoint is then copied however often that fails.
    """

    name: str
    stage: CarriedStage = CarriedStage.CLAIMING
    generation: int = 0
    lineage: int = 0
    search: tuple[Iterator[None], HomeCheckpoints] | None = None
    search_at: float = 0.0
    waits_since: float | None = None
    fetching: Parcel | None = None
    damaged: dict[Parcel, int] = field(default_factory=dict)
    candidates: list[Parcel] = field(default_factory=list)
    reason: str = ""
    finished: float = 0.0
    confirmed: bool = False
    scanned: bool = False
    leaving: bool = False


logger = logging.getLogger(__name__)


@dataclass
class SeenCheckpoints:
    """What is known to have been whole at home.

    Parameters
    ----------
    lease
        Seconds. What has been neither listed nor fetched for so long is gone.
    longest
        Seconds between two searches, at most.
    newest
        Training -> its newest checkpoint; also if it has arrived damaged, as the next copy may not be.
    """

    lease: float
    longest: float
    newest: dict[str, Parcel] = field(default_factory=dict)

    def under_way(self, parcels: Iterable[Parcel]) -> None:
        """Note what an earlier driver of the run was sending: it is listed soon, and may be lost here."""
        for parcel in parcels:
            known = self.newest.get(parcel.training)
            if known is None or parcel.order > known.order:
                self.newest[parcel.training] = parcel

    def candidates(
        self, item: CarriedTraining, later: list[Parcel], best: tuple[int, int, int] | None, now: float
    ) -> list[Parcel] | None:
        """Return the checkpoints to fetch after a search, oldest first, possibly none; ``None``: search again later.

        `later` are those that home lists and that are later than those here, oldest first; `best` is the order of the
        newest one here, if there is any. The item gets the reason to search again.
        """
        known = self.newest.get(item.name)
        last = later[-1].order if later else best
        if known is None or (last is not None and known.order <= last):
            if later:
                self.newest[item.name], item.waits_since = later[-1], None
            elif best is None and item.lineage < item.generation - 1 and not self._has_waited(item, WATCH, now):
                item.reason = "another site has owned it, and home lists no checkpoint of it; home is listed again"
                return None
            return later
        if not self._has_waited(item, 1.0, now):
            item.reason = f"home has listed {known.name} of generation {known.generation}, and does not list it now"
            return [*later, known]  # it may be there all the same
        logger.warning(
            "training job %s: %s of generation %d is no longer at home", item.name, known.name, known.generation
        )
        del self.newest[item.name]
        return later

    def _has_waited(self, item: CarriedTraining, leases: float, now: float) -> bool:
        """Return whether something has been missing for so long; search again later if it has not."""
        item.waits_since = now if item.waits_since is None else item.waits_since
        item.search_at = now + min(leases * self.lease / 4, self.longest)
        return now - item.waits_since >= leases * self.lease
