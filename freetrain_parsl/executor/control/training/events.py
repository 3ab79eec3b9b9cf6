"""What happens to a training, as its state machine is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from freetrain_parsl.protocol.reports import Report, RunEnd

__all__ = [
    "Assigned",
    "Cancelled",
    "Event",
    "Failed",
    "Heartbeat",
    "MachineSized",
    "Reported",
    "RunOver",
    "SlotLost",
    "StorageBack",
    "StoragePostponed",
    "Tick",
]


@dataclass(frozen=True)
class Assigned:
    """The planner wants it on these nodes."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class Cancelled:
    """It is to end with its state saved."""


@dataclass(frozen=True)
class Failed:
    """It cannot go on, for a reason outside it."""

    error: BaseException


@dataclass(frozen=True)
class MachineSized:
    """There are so many nodes in all."""

    nodes: int


@dataclass(frozen=True)
class Reported:
    """Run number `run`, in a slot, reports."""

    slot: str
    run: int
    report: Report


@dataclass(frozen=True)
class RunOver:
    """Run number `run`, in a slot, has ended; `payload` is its value or exception, serialised."""

    slot: str
    run: int
    end: RunEnd
    payload: bytes = b""


@dataclass(frozen=True)
class Heartbeat:
    """A slot's process lives; its training has waited for the other members for `waited` seconds."""

    slot: str
    waited: float


@dataclass(frozen=True)
class SlotLost:
    """A slot is gone; a `crash` is a loss that the batch system did not cause."""

    slot: str
    reason: str
    crash: bool


@dataclass(frozen=True)
class StoragePostponed:
    """The checkpoint directory cannot be used: why, and until when it is not tried again (seconds)."""

    condition: str
    until: float


@dataclass(frozen=True)
class StorageBack:
    """The checkpoint directory can be used again."""


@dataclass(frozen=True)
class Tick:
    """Time has passed; `arrived`: the slots that have come to the meeting of the next group."""

    arrived: frozenset[str] = frozenset()


Event: TypeAlias = (
    Assigned
    | Cancelled
    | Failed
    | MachineSized
    | Reported
    | RunOver
    | Heartbeat
    | SlotLost
    | StoragePostponed
    | StorageBack
    | Tick
)
