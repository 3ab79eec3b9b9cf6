"""The events of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.protocol.messages import RunMessage

__all__ = [
    "Assigned",
    "BatchChosen",
    "Cancelled",
    "Event",
    "Extended",
    "Failed",
    "Heartbeat",
    "MachineSized",
    "Said",
    "SlotLost",
    "StorageBack",
    "StoragePostponed",
    "TimePassed",
]


@dataclass(frozen=True)
class Assigned:
    """The planner assigns these nodes to the job."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class BatchChosen:
    """Its batches should have `size` samples on its present nodes."""

    size: int


@dataclass(frozen=True)
class Cancelled:
    """A training job of the job must end with its state saved."""

    training: str


@dataclass(frozen=True)
class Failed:
    """The job cannot continue, for an external reason."""

    error: Exception


@dataclass(frozen=True)
class Extended:
    """Further training jobs belong to the job, whose kind has added them."""

    requests: Sequence[TrainingRequest]


@dataclass(frozen=True)
class MachineSized:
    """There are `nodes` nodes in total, and these of each kind."""

    nodes: int
    by_kind: Mapping[str, int]


@dataclass(frozen=True)
class Said:
    """A slot in which the job runs has sent a message about a run, perhaps an earlier one."""

    slot: str
    message: RunMessage


@dataclass(frozen=True)
class Heartbeat:
    """A slot is alive; its training job has been waiting for the other members for `waited` seconds."""

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
    | Extended
    | Failed
    | MachineSized
    | Heartbeat
    | Said
    | SlotLost
    | StoragePostponed
    | StorageBack
    | TimePassed
)
