"""What a coordinator knows of sites and trainings, and the calls that it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.globus.sites.planning.rates import SiteRates, fit_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.extensions.globus.sites.answers import SiteAnswer, SiteFacts, TrainingAtSite
    from freetrain_parsl.extensions.globus.sites.planning.model import Offer
    from freetrain_parsl.planning.model import Trainer

_ASSUMED_START = 60.0  # seconds
_STARTS = 5  # measured starts that count

__all__ = ["Ask", "CallPace", "SiteCall", "SiteState", "TrainingPlace"]


class Ask(Enum):
    """What a site is asked."""

    PREPARE = "prepare"
    """To unpack the campaign."""
    LOOK = "look"
    """For its state and its offers."""
    STATUS = "status"
    """For its state; it takes in the current order, too."""
    STOP = "stop"
    """To save all trainings and end its driver."""


@dataclass(frozen=True)
class SiteCall:
    """A call to make now.

    Parameters
    ----------
    site
        Name of the site.
    ask
        What is asked.
    order, trainings
        The order that the call carries.
    start
        Whether a driver is started for it, if none runs.
    """

    site: str
    ask: Ask
    order: int = 0
    trainings: tuple[str, ...] = ()
    start: bool = False


@dataclass(frozen=True)
class CallPace:
    """How often sites are asked.

    Parameters
    ----------
    look
        Seconds between decisions.
    status
        Seconds between questions for the progress.
    """

    look: float
    status: float


@dataclass
class SiteState:
    """What is known of a site.

    Parameters
    ----------
    name
        Its name.
    stated
        Transfer rates until copies are measured.
    facts
        ``None`` until it has unpacked the campaign.
    order, wanted
        The last order, and its trainings.
    possible
        Trainings of all orders that it may have taken in since the last one that it has confirmed.
    seen
        When it answered last.
    answer
        Its last answer.
    offers
        Nodes that could be obtained, as of the last look.
    silent
        Why it does not answer; empty if it does.
    starts
        The last measured times from the assignment of a training, and the arrival of its state, until it had nodes.
    """

    name: str
    stated: SiteRates = field(default_factory=SiteRates)
    facts: SiteFacts | None = None
    order: int = 0
    wanted: tuple[str, ...] = ()
    possible: set[str] = field(default_factory=set)
    confirmed: int = 0
    seen: float | None = None
    answer: SiteAnswer | None = None
    offers: tuple[Offer, ...] = ()
    silent: str = ""
    failures: int = 0
    asking: Ask | None = None
    owes_look: bool = True
    stopped: bool = False
    next_call: float = 0.0
    next_stop: float = 0.0
    trainings: Mapping[str, TrainingAtSite] = field(default_factory=dict)
    starts: tuple[float, ...] = ()

    @property
    def start(self) -> float:
        """Seconds until a training that is new there has nodes: the median of those measured, or what is assumed."""
        return median(self.starts) if self.starts else _ASSUMED_START

    def measured(self, start: float) -> None:
        """Note how long a start took, seconds."""
        self.starts = (*self.starts, max(0.0, start))[-_STARTS:]

    @property
    def answers(self) -> bool:
        """Whether it is ready and its last call was answered."""
        return self.facts is not None and not self.silent and self.seen is not None

    def lease_until(self) -> float:
        """Return when its trainings may go on elsewhere if it stays silent."""
        if self.seen is None or self.facts is None:
            return 0.0
        return self.seen + self.facts.lease

    def rates(self) -> SiteRates:
        """Return its measured rates, or those assumed."""
        if self.answer is None:
            return self.stated
        return SiteRates(
            fit_rate(self.answer.copies_to_home, self.stated.to_home),
            fit_rate(self.answer.copies_from_home, self.stated.from_home),
        )

    @property
    def held(self) -> float:
        """Number of nodes that our blocks have there."""
        return 0.0 if self.answer is None else sum(offer.nodes for offer in self.answer.held)

    @property
    def idle(self) -> float:
        """Number of nodes that could be obtained there."""
        return sum(offer.nodes for offer in self.offers)


@dataclass
class TrainingPlace:
    """Where a training is.

    Parameters
    ----------
    trainer
        As the planner sees it.
    site
        The site to which it is assigned.
    reason
        Why, in the planner's words.
    size
        Bytes of its newest known checkpoint.
    samples_left
        ``None`` if not known.
    ended
        Its last state, once it has ended.
    ended_at
        The site where it has ended.
    moves
        How often it has been assigned to another site.
    arrives
        When its state is expected there, and its driver ready; until then it is not assigned elsewhere.
    starting
        When its state is expected there, if it was assigned to idle nodes and has not had any since.
    attempt
        How often the user has retried it.
    """

    trainer: Trainer
    site: str | None = None
    reason: str = ""
    size: float = 0.0
    samples_left: float | None = None
    ended: TrainingAtSite | None = None
    ended_at: str = ""
    moves: int = 0
    arrives: float = 0.0
    starting: float | None = None
    attempt: int = 0
