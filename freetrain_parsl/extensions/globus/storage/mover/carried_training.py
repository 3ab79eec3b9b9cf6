"""A training whose checkpoints a driver's mover carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.extensions.globus.storage.home_listing import HomeCheckpoints
    from freetrain_parsl.extensions.globus.storage.mover.carrier import Parcel

__all__ = ["CarriedStage", "CarriedTraining"]


class CarriedStage(Enum):
    """Where a training is on its way; see `freetrain_parsl.extensions.globus.storage.mover.mover`."""

    CLAIMING = "claiming"
    SEARCHING = "searching"
    FETCHING = "fetching"
    READY = "ready"
    FINISHED = "finished"
    OVER = "over"


@dataclass
class CarriedTraining:
    """A training of this driver.

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
        Whether it goes on at another site; its last checkpoint is then copied however often that fails.
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
