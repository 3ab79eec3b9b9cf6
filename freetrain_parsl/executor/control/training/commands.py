"""What the state machine of a training wants to be done, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.journal import Record
    from freetrain_parsl.protocol.messages import ChangeGroup, PauseRun, Place
    from freetrain_parsl.protocol.reports import Progress

__all__ = [
    "AwaitStorage",
    "CloseStore",
    "Command",
    "CountRestart",
    "Fail",
    "ForgetStorage",
    "Inform",
    "KeepProgress",
    "Kill",
    "Log",
    "OpenStore",
    "Release",
    "Resolve",
    "Send",
    "SetAside",
    "Start",
]


@dataclass(frozen=True)
class Start:
    """Run the training in a slot, as run number `run`; without a `place`, as a newcomer."""

    slot: str
    run: int
    place: Place | None


@dataclass(frozen=True)
class Send:
    """Send a message to a slot."""

    slot: str
    message: ChangeGroup | PauseRun


@dataclass(frozen=True)
class Release:
    """The slot has no run of this training any more."""

    slot: str


@dataclass(frozen=True)
class Kill:
    """End a slot's process, which does not end by itself."""

    slot: str
    reason: str


@dataclass(frozen=True)
class SetAside:
    """Take a slot's node out of the pool for some time."""

    slot: str
    reason: str


@dataclass(frozen=True)
class OpenStore:
    """Open the rendezvous store of a group."""

    group: int


@dataclass(frozen=True)
class CloseStore:
    """Close the rendezvous store of a group."""

    group: int


@dataclass(frozen=True)
class AwaitStorage:
    """Report when the checkpoint directory, now in this `condition`, can be used again."""

    condition: str


@dataclass(frozen=True)
class ForgetStorage:
    """The checkpoint directory works for this training."""


@dataclass(frozen=True)
class CountRestart:
    """All members have failed: the training falls back on its newest checkpoint."""


@dataclass(frozen=True)
class Inform:
    """Tell the planner."""

    event: planner.Event


@dataclass(frozen=True)
class KeepProgress:
    """Replace the last progress report in the journal."""

    progress: Progress


@dataclass(frozen=True)
class Log:
    """Record what happened."""

    record: Record


@dataclass(frozen=True)
class Resolve:
    """The training is done: resolve its future to this serialised value."""

    payload: bytes


@dataclass(frozen=True)
class Fail:
    """The training has failed; `error` is an exception, or one that a slot serialised."""

    error: BaseException | bytes


Command: TypeAlias = (
    Start
    | Send
    | Release
    | Kill
    | SetAside
    | OpenStore
    | CloseStore
    | CountRestart
    | AwaitStorage
    | ForgetStorage
    | Inform
    | KeepProgress
    | Log
    | Resolve
    | Fail
)
