"""The events of a training's state machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from freetrain_parsl.protocol.messages import StoredValue
    from freetrain_parsl.protocol.reports import ArraySized, Progress, Report, RunEnd

__all__ = [
    "Assigned",
    "BatchChosen",
    "Cancelled",
    "Event",
    "Failed",
    "Heartbeat",
    "MachineSized",
    "MemberOver",
    "MemberReported",
    "Reported",
    "RunOver",
    "SlotLost",
    "StorageBack",
    "StoragePostponed",
    "TimePassed",
]


@dataclass(frozen=True)
class Assigned:
    """The planner assigns these nodes to the training."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class BatchChosen:
    """Its batches should have `size` samples on its present nodes."""

    size: int


@dataclass(frozen=True)
class Cancelled:
    """The training must end with its state saved."""


@dataclass(frozen=True)
class Failed:
    """The training cannot continue, for an external reason."""

    error: Exception


@dataclass(frozen=True)
class MachineSized:
    """There are `nodes` nodes in total."""

    nodes: int


@dataclass(frozen=True)
class Reported:
    """Run number `run` in a slot has sent a report."""

    slot: str
    run: int
    report: Report | ArraySized


@dataclass(frozen=True)
class RunOver:
    """Run number `run` in a slot has ended; `payload` is its serialized value or exception, or `stored` the value."""

    slot: str
    run: int
    end: RunEnd
    payload: bytes = b""
    stored: StoredValue | None = None


@dataclass(frozen=True)
class MemberReported:
    """A member of the array that is run number `run` in a slot has reported its progress."""

    slot: str
    run: int
    member: str
    progress: Progress


@dataclass(frozen=True)
class MemberOver:
    """A member has left the array that is run number `run` in a slot; the rest as in `RunOver`."""

    slot: str
    run: int
    member: str
    end: RunEnd
    payload: bytes = b""
    stored: StoredValue | None = None


@dataclass(frozen=True)
class Heartbeat:
    """A slot is alive; its training has been waiting for the other members for `waited` seconds."""

    slot: str
    waited: float


@dataclass(frozen=True)
class SlotLost:
    """A slot has failed; a `crash` is a failure that the batch system did not cause."""

    slot: str
    reason: str
    crash: bool


@dataclass(frozen=True)
class StoragePostponed:
    """The checkpoint directory cannot be used: the reason, and the time of the next attempt (seconds)."""

    condition: str
    until: float


@dataclass(frozen=True)
class StorageBack:
    """The checkpoint directory can be used again."""


@dataclass(frozen=True)
class TimePassed:
    """Time has passed; `arrived`: the slots that have joined the rendezvous of the next group."""

    arrived: frozenset[str] = frozenset()


Event: TypeAlias = (
    Assigned
    | BatchChosen
    | Cancelled
    | Failed
    | MachineSized
    | Reported
    | RunOver
    | MemberReported
    | MemberOver
    | Heartbeat
    | SlotLost
    | StoragePostponed
    | StorageBack
    | TimePassed
)
