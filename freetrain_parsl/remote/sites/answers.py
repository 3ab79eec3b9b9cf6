"""What a site says to the coordinator, checked where it arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import PlanningError, RemoteError
from freetrain_parsl.planning.sites.model import Offer, offers_of_plan
from freetrain_parsl.remote.messages import RemoteStatus, field_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENDED", "SiteAnswer", "SiteFacts", "TrainingAtSite"]

ENDED = ("finished", "failed", "cancelled")
"""States of trainings that have ended."""

_STATES = ("waiting", "running", *ENDED)


@dataclass(frozen=True)
class SiteFacts:
    """What does not change at a site.

    Parameters
    ----------
    home
        Where checkpoints of all sites meet.
    lease
        Seconds after which its trainings go on elsewhere, if it is silent.
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
        lease = float(field_of(document, "lease", (int, float)))
        if not (math.isfinite(lease) and lease > 0):
            raise RemoteError(f"the site sent an unexpected answer (a lease of {lease} s)")
        return cls(field_of(document, "home", str), lease)


@dataclass(frozen=True)
class TrainingAtSite:
    """A training as a site sees it: the columns of ``freetrain status``."""

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
    plan_error
        Why that is not known.
    sizes, samples_left
        Training -> bytes of its newest checkpoint there, and samples left, if known.
    copies_to_home, copies_from_home
        Bytes and seconds of measured copies.
    copying
        What the mover does, in lines.
    """

    facts: SiteFacts
    order: int
    state: str
    message: str = ""
    trainings: Mapping[str, TrainingAtSite] = field(default_factory=dict)
    held: tuple[Offer, ...] = ()
    planned: tuple[Offer, ...] | None = None
    plan_error: str = ""
    sizes: Mapping[str, float] = field(default_factory=dict)
    samples_left: Mapping[str, float] = field(default_factory=dict)
    copies_to_home: tuple[tuple[float, float], ...] = ()
    copies_from_home: tuple[tuple[float, float], ...] = ()
    copying: tuple[str, ...] = ()

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> SiteAnswer:
        """Read it from a message.

        Raises
        ------
        RemoteError
            The site sent something else.
        """
        status = RemoteStatus.parse(field_of(document, "status", dict))
        try:
            measured = [(bool(there), _amount(size), _amount(took)) for there, size, took in document["measured"]]
            return cls(
                facts=SiteFacts.parse(document),
                order=field_of(document, "order", int),
                state=status.state,
                message=status.message,
                trainings={one.name: one for one in map(_training, (status.summary or {"trainings": []})["trainings"])},
                held=tuple(Offer(nodes, seconds) for nodes, seconds in document["held"]),
                planned=offers_of_plan(document["plan"]) if "plan" in document else None,
                plan_error=str(document.get("plan_error", ""))[:500],
                sizes={str(name): _amount(size) for name, size in document["sizes"].items()},
                samples_left={str(name): _amount(left) for name, left in document["samples_left"].items()},
                copies_to_home=tuple((size, took) for there, size, took in measured if not there),
                copies_from_home=tuple((size, took) for there, size, took in measured if there),
                copying=tuple(str(line)[:500] for line in document["copying"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, PlanningError) as error:
            raise RemoteError(
                f"the site sent an unexpected answer ({error}); is another version of freetrain-parsl there?"
            ) from None


def _amount(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{number} is no amount")
    return number


def _training(item: Mapping[str, Any]) -> TrainingAtSite:
    state, share = item["state"], item["share"]
    if state not in _STATES:
        raise ValueError(f"unknown state {str(state)[:40]!r}")
    return TrainingAtSite(
        name=str(item["name"]),
        state=state,
        share=None if share is None else float(share),
        nodes=tuple(map(str, item["nodes"])),
        result=item["result"],
        error=None if item["error"] is None else str(item["error"]),
        remark=None if item["remark"] is None else str(item["remark"]),
    )
