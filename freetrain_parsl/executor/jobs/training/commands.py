"""The commands of a training's state machine, and its response to an event, which collects them in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.journal import Record
    from freetrain_parsl.protocol.messages import ChangeBatch, ChangeGroup, PauseRun, Place, ReleaseMember, StoredValue
    from freetrain_parsl.protocol.reports import Progress

__all__ = [
    "Add",
    "AwaitStorage",
    "CloseStore",
    "Command",
    "CountRestart",
    "Fail",
    "ForgetStorage",
    "FormArray",
    "Inform",
    "JoinCohort",
    "KeepProgress",
    "Kill",
    "Log",
    "OpenStore",
    "Release",
    "Resolve",
    "Response",
    "Send",
    "SetAside",
    "Start",
    "TrainAlone",
]


@dataclass(frozen=True)
class Start:
    """Run the training in a slot, as run number `run`; without a `place`, as a newcomer."""

    slot: str
    run: int
    place: Place | None


@dataclass(frozen=True)
class FormArray:
    """Run an array in a slot, as run number `run`; an `Add` for each of the `members` follows.

    Parameters
    ----------
    slot, run
        Where, and the number.
    members, limit, size
        As in the message.
    """

    slot: str
    run: int
    members: tuple[str, ...]
    limit: int | None
    size: int | None


@dataclass(frozen=True)
class Add:
    """Add the training to the array that is run number `run` in a slot; `array` is the name in its messages."""

    slot: str
    array: str
    run: int


@dataclass(frozen=True)
class Send:
    """Send a message to a slot."""

    slot: str
    message: ChangeBatch | ChangeGroup | PauseRun | ReleaseMember


@dataclass(frozen=True)
class Release:
    """Release a slot whose run of this training has ended."""

    slot: str


@dataclass(frozen=True)
class Kill:
    """Kill a slot's process, which does not end by itself."""

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
    """Send an event when the checkpoint directory, now in this `condition`, can be used again."""

    condition: str


@dataclass(frozen=True)
class ForgetStorage:
    """Note that the checkpoint directory works for this training."""


@dataclass(frozen=True)
class CountRestart:
    """Count a restart: all members have failed, and the training falls back to its newest checkpoint."""


@dataclass(frozen=True)
class Inform:
    """Pass an event to the planner."""

    event: planner.Event


@dataclass(frozen=True)
class KeepProgress:
    """Replace the last progress report in the journal."""

    progress: Progress


@dataclass(frozen=True)
class Log:
    """Write a record to the journal."""

    record: Record


@dataclass(frozen=True)
class Resolve:
    """Resolve the future of the finished training to this serialized value, or to the one in a file."""

    payload: bytes
    stored: StoredValue | None = None


@dataclass(frozen=True)
class TrainAlone:
    """Train the training by itself from now on, for this reason; empty: because there are enough nodes."""

    reason: str


@dataclass(frozen=True)
class JoinCohort:
    """Train the training with others of its structure, in another cohort."""

    structure: str


@dataclass(frozen=True)
class Fail:
    """Fail the training's future; `error` is an exception, or one that a slot serialized."""

    error: BaseException | bytes


Command: TypeAlias = (
    Start
    | FormArray
    | Add
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
    | TrainAlone
    | JoinCohort
    | Fail
)


class Response:
    """Collects the commands in response to an event; shared by the parts of a training's state machine.

    Attributes
    ----------
    now
        Time of the event, seconds.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self._commands: list[Command] = []

    def do(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def log(self, entry: Record) -> None:
        """Add a record of the journal."""
        self.do(Log(entry))

    def inform(self, event: planner.Event) -> None:
        """Add an event of the planner."""
        self.do(Inform(event))

    def take(self) -> list[Command]:
        """Return the commands, and start with none again."""
        commands, self._commands = self._commands, []
        return commands
