"""What sites say, checked, what a coordinator knows of sites and jobs and keeps, and the calls that it makes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput, PlanningError, RemoteError
from freetrain_parsl.extensions.globus.remote.messages import field_of, parse_status, plain_text
from freetrain_parsl.extensions.globus.sites.planning.model import Offer, SiteRates, fit_rate, offers_of_plan
from freetrain_parsl.storage.atomic_files import replace_text
from freetrain_parsl.storage.owned_files import read_small_file
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from freetrain_parsl.planning.model import PlannedJob

__all__ = [
    "COORDINATOR",
    "ENDED",
    "Ask",
    "CallPace",
    "CoordinatorFile",
    "SiteAnswer",
    "SiteCall",
    "SiteFacts",
    "SiteState",
    "TrainingAtSite",
    "TrainingPlace",
    "site_lines",
]

ENDED = ("finished", "failed", "cancelled")
"""States of training jobs that have ended."""

_STATES = ("waiting", "running", *ENDED)
_LONGEST_LEASE = 1e9  # seconds
_MOST_ORDERS = 2**53
_MOST_SLOTS = 1000  # of a node


@dataclass(frozen=True)
class SiteFacts:
    """What does not change at a site.

    Where checkpoints of all sites meet, and the seconds after which its training jobs continue elsewhere, if it is
    silent.
    """

    home: str
    lease: float

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> SiteFacts:
        """Read them from a message.

        Raises
        ------
        RemoteError
            The site sent something else.
        """
        lease = field_of(document, "lease", (int, float))
        if not 0 < lease < _LONGEST_LEASE:  # also of NaN, and of integers that are no floats
            raise RemoteError("the site sent an unexpected answer (its lease is no duration)")
        return cls(plain_text(field_of(document, "home", str)), float(lease))


@dataclass(frozen=True)
class TrainingAtSite:
    """A training job as a site sees it: the columns of ``freetrain status``."""

    name: str
    state: str
    share: float | None
    nodes: tuple[str, ...]
    result: Any = None
    error: str | None = None
    remark: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended there for good."""
        return self.state in ENDED


@dataclass(frozen=True)
class SiteAnswer:
    """The answer to a look.

    Parameters
    ----------
    facts
        Home and lease.
    run
        Name of the run at the site.
    order
        The last order that the site has taken in.
    state
        Of its driver.
    message
        What the user should know of the driver.
    trainings
        Training -> its state there.
    held
        Nodes of our blocks.
    planned
        Nodes that could be obtained; ``None`` if that was not asked.
    slots_per_node, units_per_node
        As in `SiteView`, if `planned` is known.
    plan_error
        Why that is not known.
    sizes, samples_left
        Training -> bytes of its newest checkpoint there, and samples left, if known.
    copies_to_home, copies_from_home
        Bytes and seconds of measured copies.
    copying
        What the mover does, in lines.
    retried
        Training -> number of the last retry that the site has taken in.
    """

    facts: SiteFacts
    order: int
    state: str
    run: str = ""
    message: str = ""
    trainings: Mapping[str, TrainingAtSite] = field(default_factory=dict)
    held: tuple[Offer, ...] = ()
    planned: tuple[Offer, ...] | None = None
    slots_per_node: int = 1
    units_per_node: int = 1
    plan_error: str = ""
    sizes: Mapping[str, float] = field(default_factory=dict)
    samples_left: Mapping[str, float] = field(default_factory=dict)
    copies_to_home: tuple[tuple[float, float], ...] = ()
    copies_from_home: tuple[tuple[float, float], ...] = ()
    copying: tuple[str, ...] = ()
    retried: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> SiteAnswer:
        """Read it from a message.

        Raises
        ------
        RemoteError
            The site sent something else.
        """
        status = parse_status(field_of(document, "status", dict))
        try:
            measured = [(bool(there), _amount(size), _amount(took)) for there, size, took in document["measured"]]
            return cls(
                facts=SiteFacts.parse(document),
                order=_order(field_of(document, "order", int)),
                state=status.state,
                run=status.run,
                message=status.message,
                trainings={one.name: one for one in map(_training, (status.summary or {"trainings": []})["trainings"])},
                held=tuple(Offer(_amount(nodes), float(seconds)) for nodes, seconds in document["held"]),
                planned=offers_of_plan(document["plan"]) if "plan" in document else None,
                slots_per_node=_slots(document, "slots_per_node"),
                units_per_node=_slots(document, "units_per_node"),
                plan_error=plain_text(document.get("plan_error", ""), 500),
                sizes={str(name): _amount(size) for name, size in document["sizes"].items()},
                samples_left={str(name): _amount(left) for name, left in document["samples_left"].items()},
                copies_to_home=tuple((size, took) for there, size, took in measured if not there),
                copies_from_home=tuple((size, took) for there, size, took in measured if there),
                copying=tuple(plain_text(line, 500) for line in document["copying"]),
                retried={str(name): _order(int(number)) for name, number in document["retried"].items()},
            )
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, PlanningError) as error:
            raise RemoteError(
                f"the site sent an unexpected answer ({error}); is another version of freetrain-parsl there?"
            ) from None


def _amount(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{number} is no amount")
    return number


def _order(number: int) -> int:
    if not 0 <= number < _MOST_ORDERS:
        raise ValueError("an order has a number of its own")
    return number


def _slots(document: Mapping[str, Any], key: str) -> int:
    number = document["plan"][key] if "plan" in document else 1
    if not (isinstance(number, int) and 0 < number <= _MOST_SLOTS):
        raise ValueError("a node has one slot or more")
    return number


def _storable(result: Any) -> Any:
    # ValueError: half of a surrogate pair can be neither stored nor shown.
    json.dumps(result, ensure_ascii=False).encode()
    return result


def _training(item: Mapping[str, Any]) -> TrainingAtSite:
    state, share = item["state"], item["share"]
    if state not in _STATES:
        raise ValueError(f"unknown state {str(state)[:40]!r}")
    return TrainingAtSite(
        name=str(item["name"]),
        state=state,
        share=None if share is None else float(share),
        nodes=tuple(map(plain_text, item["nodes"])),
        result=_storable(item["result"]),
        error=None if item["error"] is None else plain_text(item["error"]),
        remark=None if item["remark"] is None else plain_text(item["remark"]),
    )


_ASSUMED_START = 60.0  # seconds
_STARTS = 5  # measured starts that count


class Ask(Enum):
    """What a site is asked."""

    PREPARE = "prepare"
    """To unpack the campaign."""
    LOOK = "look"
    """For its state and its offers."""
    STATUS = "status"
    """For its state; it takes in the current order, too."""
    STOP = "stop"
    """To save all training jobs and end its driver."""


@dataclass(frozen=True)
class SiteCall:
    """A call to make now.

    Parameters
    ----------
    site
        Name of the site.
    ask
        What is asked.
    order, training jobs
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
    """How often sites are asked: seconds between decisions, and between questions for the progress."""

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
        The last order, and its training jobs.
    possible
        Training jobs of all orders that it may have taken in since the last one that it has confirmed.
    seen
        When it answered last.
    answer
        Its last answer.
    offers
        Nodes that could be obtained, as of the last look.
    slots_per_node, units_per_node
        As in `SiteView`, as of that look.
    silent
        Why it does not answer; empty if it does.
    starts
        The last measured times from the assignment of a training job, and the arrival of its state, until it had nodes.
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
    slots_per_node: int = 1
    units_per_node: int = 1
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
        """Seconds until a job that is new there has nodes: the median of those measured, or what is assumed."""
        return median(self.starts) if self.starts else _ASSUMED_START

    def measured(self, start: float) -> None:
        """Note how long a start took, seconds."""
        self.starts = (*self.starts, max(0.0, start))[-_STARTS:]

    @property
    def answers(self) -> bool:
        """Whether it is ready and its last call was answered."""
        return self.facts is not None and not self.silent and self.seen is not None

    def lease_until(self) -> float:
        """Return when its training jobs may continue elsewhere if it stays silent."""
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
    """Where a training job is.

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

    trainer: PlannedJob
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


COORDINATOR = "coordinator.json"


@dataclass(frozen=True)
class CoordinatorFile:
    """The content of the file: what `Coordinator.as_json` returned, and the sites, one line each."""

    document: dict[str, Any]
    lines: Sequence[str]

    def write(self, run_dir: Path) -> None:
        """Replace the file durably."""
        document = {"coordinator": self.document, "lines": list(self.lines)}
        replace_text(run_dir / COORDINATOR, json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Read the file; ``None`` if there is none.

        Raises
        ------
        InvalidInput
            It is damaged.
        """
        path = run_dir / COORDINATOR
        try:
            document = parse_stored(read_small_file(path))
            return cls({**document["coordinator"]}, tuple(map(str, document["lines"])))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None


def site_lines(run_dir: Path) -> list[str]:
    """Describe the sites of a run, as its coordinator has seen them last."""
    kept = CoordinatorFile.read(run_dir)
    return [] if kept is None else list(kept.lines)
