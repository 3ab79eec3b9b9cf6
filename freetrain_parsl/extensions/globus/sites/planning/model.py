"""The situation of several sites, and a plan for their training jobs: frozen, validated values. Times are seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidSettings, PlanningError
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import PlannedJob

__all__ = [
    "ASSUMED",
    "HOME",
    "Offer",
    "SiteChoice",
    "SitePlan",
    "SiteRates",
    "SiteTraining",
    "SiteView",
    "SitesPlanner",
    "SitesQuestion",
    "SitesSettings",
    "TransferRate",
    "Verb",
    "fit_rate",
    "in_common_units",
    "offers_of_plan",
    "rates_between",
]


class Verb(str, Enum):
    """What a training job does until the next look."""

    STAY = "stay"
    """It stays at its site."""
    MOVE = "move"
    """It pauses at its site, if it runs there, and continues at another one from its newest checkpoint."""
    START = "start"
    """It has no site, and starts or continues at one."""
    WAIT = "wait"
    """No nodes are expected for it. It waits at its site, or at none."""


@dataclass(frozen=True)
class Offer:
    """Nodes that training jobs could use at a site.

    Parameters
    ----------
    nodes
        How many, or how many are expected on average.
    seconds
        For how long from now; infinity if they are expected to last, or to be replaced by others.
    """

    nodes: float
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.nodes < math.inf and self.seconds >= 0):
            raise PlanningError(f"an offer needs zero or more nodes and seconds, got {self.nodes} and {self.seconds}")


@dataclass(frozen=True)
class SiteView:
    """A site as it was last seen.

    Parameters
    ----------
    name
        Its name, which is also that of its collection in `SiteTraining.checkpoints` and `SitesQuestion.transfers`.
    offers
        All nodes that our training jobs hold there or could obtain.
    answers
        Whether it answered this time. A site that did not gets no training jobs.
    start
        Seconds until a training job that is new there, with its state, has nodes: the call, and the start of a driver.
    slots_per_node
        Number of slots of its nodes, the least if there are several kinds.
    units_per_node
        The same if training jobs share its nodes, otherwise 1.
    """

    name: str
    offers: tuple[Offer, ...] = ()
    answers: bool = True
    start: float = 0.0
    slots_per_node: int = 1
    units_per_node: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start >= 0):
            raise PlanningError(f"site {self.name!r}: a start must take zero or more seconds, got {self.start}")

    def mean_nodes(self, seconds: float) -> float:
        """Return the mean number of nodes that it offers in the next `seconds`; none if it does not answer."""
        if not self.answers:
            return 0.0
        return sum(offer.nodes * min(offer.seconds, seconds) for offer in self.offers) / seconds


@dataclass(frozen=True)
class TransferRate:
    """How fast state is transferred from one collection to another.

    Parameters
    ----------
    bytes_per_second
        Measured throughput.
    latency
        Seconds until a transfer starts and is noticed to have ended.
    """

    bytes_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise PlanningError(f"a transfer rate must be positive, got {self.bytes_per_second} bytes per second")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise PlanningError(f"the latency of a transfer must be zero or more seconds, got {self.latency}")

    def seconds(self, size: float) -> float:
        """Return how long `size` bytes take; nothing takes no time."""
        return self.latency + size / self.bytes_per_second if size else 0.0


@dataclass(frozen=True)
class SiteTraining:
    """A training job that is not done.

    Parameters
    ----------
    trainer
        The training job as the planner of a site sees it.
    state_bytes
        Size of its checkpoint.
    checkpoints
        The collections that hold its newest whole checkpoint; empty if it has saved none.
    site
        The site that owns it, where its state is or arrives; ``None`` if none does.
    nodes
        Its nodes there now.
    lease_until
        When that site's ownership ends if it does not answer, seconds.
    arrives
        When its state will be at its site, seconds, if it is being transferred.
    """

    trainer: PlannedJob
    state_bytes: float = 0.0
    checkpoints: frozenset[str] = frozenset()
    site: str | None = None
    nodes: int = 0
    lease_until: float = -math.inf
    arrives: float = -math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.state_bytes) and self.state_bytes >= 0):
            raise PlanningError(
                f"training job {self.name!r}: its state must be zero or more bytes, got {self.state_bytes}"
            )
        if self.nodes < 0 or (self.nodes and self.site is None):
            raise PlanningError(f"training job {self.name!r}: {self.nodes} nodes at site {self.site!r} are impossible")

    @property
    def name(self) -> str:
        """Name of the training job."""
        return self.trainer.name


@dataclass(frozen=True)
class SitesQuestion:
    """All that a decision depends on.

    Parameters
    ----------
    now
        Seconds, on the clock of the leases and arrivals.
    horizon
        Seconds until the next look.
    sites
        All sites.
    trainings
        All training jobs that are not done.
    transfers
        (from collection, to site) -> measured rate. Without a rate there is no transfer.
    unit
        What is counted, in texts.

    Raises
    ------
    PlanningError
        Names are not unique, a training job's site does not exist, or there is no time until the next look.
    """

    now: float
    horizon: float
    sites: tuple[SiteView, ...]
    trainings: tuple[SiteTraining, ...]
    transfers: Mapping[tuple[str, str], TransferRate] = field(default_factory=dict)
    unit: str = "nodes"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.now) and math.isfinite(self.horizon) and self.horizon > 0):
            raise PlanningError(
                f"sites: a finite time and a positive horizon are needed, got {self.now}, {self.horizon}"
            )
        for kind, names in (
            ("sites", Counter(site.name for site in self.sites)),
            ("trainings", Counter(training.name for training in self.trainings)),
        ):
            if twice := [name for name, number in names.items() if number > 1]:
                raise PlanningError(f"sites: two {kind} have the same name {twice[0]!r}")
        known = {site.name for site in self.sites}
        for training in self.trainings:
            if training.site is not None and training.site not in known:
                raise PlanningError(f"training job {training.name!r} is at an unknown site {training.site!r}")


def in_common_units(question: SitesQuestion, sized: Callable[[str, int, int], PlannedJob]) -> SitesQuestion:
    """Return a question in one unit: slots, if all sites share nodes and have equal numbers of them, otherwise nodes.

    In nodes, a training job on some slots of a node counts as one on this node.

    Parameters
    ----------
    question
        Offers are in nodes, nodes of training jobs in the units of their site.
    sized
        Training job, number of slots of a node, number of units of a node -> the training job in these units.
    """
    answering = [site for site in question.sites if site.answers]
    numbers = {site.units_per_node for site in answering}
    units = numbers.pop() if len(numbers) == 1 else 1
    slots = min((site.slots_per_node for site in answering), default=1)
    divisors = {site.name: 1 if units > 1 else site.units_per_node for site in question.sites}
    return replace(
        question,
        sites=tuple(
            replace(site, offers=tuple(replace(offer, nodes=offer.nodes * units) for offer in site.offers))
            for site in question.sites
        ),
        trainings=tuple(
            replace(
                one,
                trainer=replace(sized(one.name, slots, units), work_left=one.trainer.work_left),
                nodes=one.nodes if one.site is None else math.ceil(one.nodes / divisors[one.site]),
            )
            for one in question.trainings
        ),
        unit="slots" if units > 1 else question.unit,
    )


@dataclass(frozen=True)
class SiteChoice:
    """The decision for one training job.

    Parameters
    ----------
    training
        Its name.
    verb
        What it does.
    site
        Its site from now on; ``None`` if it waits at none.
    nodes
        Number of nodes that it is expected to have there.
    value
        What that is worth until the next look, less the cost of the change: units of the objective × seconds.
    source, transfer_seconds, transfer_bytes
        The collection from which its state is transferred, for how long, and its size; ``None``: nothing is.
    reason
        Why, in one sentence.
    """

    training: str
    verb: Verb
    site: str | None
    nodes: int
    value: float
    reason: str
    source: str | None = None
    transfer_seconds: float = 0.0
    transfer_bytes: float = 0.0


@dataclass(frozen=True)
class SitePlan:
    """The decisions for all training jobs, in order of submission.

    Parameters
    ----------
    choices
        One for each training job.
    objective
        Total value in the model, with the hysteresis.
    bound
        Upper bound on it.
    proven_optimal
        Whether no better plan exists in the model.
    solve_seconds
        Wall time of the decision.
    """

    choices: tuple[SiteChoice, ...]
    objective: float
    bound: float
    proven_optimal: bool
    solve_seconds: float = 0.0


SitesPlanner = Callable[[SitesQuestion], SitePlan]
"""Question -> plan."""


@dataclass(frozen=True)
class SitesSettings:
    """How training jobs are moved between sites.

    Parameters
    ----------
    look
        Time between two decisions.
    hysteresis
        A move must gain what it costs and this multiple of it more until the next look.
    time_limit
        After this time the best plan so far is used.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    look: timedelta = timedelta(minutes=10)
    hysteresis: float = 0.5
    time_limit: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        check_duration("SitesSettings: look", self.look)
        check_duration("SitesSettings: time_limit", self.time_limit)
        if not (math.isfinite(self.hysteresis) and self.hysteresis >= 0):
            raise InvalidSettings(f"SitesSettings: hysteresis must be zero or more, got {self.hysteresis!r}")


def offers_of_plan(figures: Mapping[str, object]) -> tuple[Offer, ...]:
    """Return the offers in what ``freetrain plan --json`` prints: the blocks that would be submitted.

    Nodes that our blocks hold already are in no plan; a driver adds them.

    Raises
    ------
    PlanningError
        It is not a plan.
    """
    blocks = figures.get("blocks")
    if not isinstance(blocks, Sequence):
        raise PlanningError("not a plan as 'freetrain plan --json' prints it: it has no list 'blocks'")
    offers = []
    for number, block in enumerate(blocks):
        nodes, seconds = (block.get(key) if isinstance(block, Mapping) else None for key in ("nodes", "walltime"))
        if not (isinstance(nodes, int) and isinstance(seconds, (int, float))):
            raise PlanningError(
                f"not a plan as 'freetrain plan --json' prints it: block {number} needs nodes, walltime"
            )
        try:
            offers.append(Offer(float(nodes), float(seconds)))
        except OverflowError:
            raise PlanningError(f"block {number} of the plan has more nodes or seconds than there can be") from None
    return tuple(offers)


HOME = "home"
"""Name of the home among the collections."""
ASSUMED = TransferRate(100e6, 30.0)
"""Until a copy is measured."""

_LEAST_SPREAD = 2.0  # largest size over smallest: with less, latency and throughput cannot be told apart


@dataclass(frozen=True)
class SiteRates:
    """The rates of one site.

    Parameters
    ----------
    to_home, from_home
        Of copies between its checkpoint directory and home.
    """

    to_home: TransferRate = ASSUMED
    from_home: TransferRate = ASSUMED


def fit_rate(copies: Sequence[tuple[float, float]], assumed: TransferRate = ASSUMED) -> TransferRate:
    """Estimate latency and throughput from measured copies, by least squares.

    Parameters
    ----------
    copies
        Bytes and seconds of each.
    assumed
        Used without copies; its throughput also if all copies have about the same size, or larger ones were no slower.
    """
    if not copies:
        return assumed
    sizes, seconds = np.array(copies, dtype=float).T
    per_byte = 1 / assumed.bytes_per_second
    if sizes.max() > _LEAST_SPREAD * max(1.0, sizes.min()):
        centred = sizes - sizes.mean()
        slope = float(centred @ seconds / (centred @ centred))
        per_byte = slope if slope > 0 else per_byte
    latency = max(0.0, float(np.mean(seconds - per_byte * sizes)))
    return TransferRate(1 / per_byte, latency)


def rates_between(sites: Mapping[str, SiteRates]) -> dict[tuple[str, str], TransferRate]:
    """Return (from collection, to site) -> rate: from home, and from each site to each other one through home."""
    rates = {(HOME, name): one.from_home for name, one in sites.items()}
    for source, one in sites.items():
        for target, other in sites.items():
            if source != target:
                up, down = one.to_home, other.from_home
                rates[source, target] = TransferRate(
                    1 / (1 / up.bytes_per_second + 1 / down.bytes_per_second), up.latency + down.latency
                )
    return rates
