"""The commands of jobs, and the response to an event, which collects them in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.journal import Record
    from freetrain_parsl.protocol.messages import RunMessage, StoredValue
    from freetrain_parsl.protocol.reports import Progress

__all__ = [
    "Addressed",
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
    "Observe",
    "OpenStore",
    "OwnCommand",
    "Release",
    "Resolve",
    "Response",
    "Send",
    "SetAside",
]


@dataclass(frozen=True)
class Send:
    """Send a message to a slot, which is busy after a `RunStart`.

    The manager adds the executor's options, and the function, to a message with the function of a training job.
    """

    slot: str
    message: RunMessage


@dataclass(frozen=True)
class Release:
    """Release a slot whose run has ended."""

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
    """Note that the checkpoint directory works for this training job."""


@dataclass(frozen=True)
class CountRestart:
    """Count a restart: all members have failed, and the training job falls back to its newest checkpoint."""


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
class Observe:
    """Learn from a progress report of a group that trains undisturbed, with `slots` processes."""

    group: int
    nodes: frozenset[str]
    slots: int
    progress: Progress


@dataclass(frozen=True)
class Resolve:
    """Resolve the future of the finished training job to this serialized value, or to the one in a file."""

    payload: bytes
    stored: StoredValue | None = None


@dataclass(frozen=True)
class Fail:
    """Fail the training job's future; `error` is an exception, or one that a slot serialized."""

    error: BaseException | bytes


@dataclass(frozen=True)
class OwnCommand:
    """A command that only the job's kind knows: see `JobKind.carry_out`."""


Command: TypeAlias = (
    Send
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
    | Observe
    | Resolve
    | Fail
    | OwnCommand
)

Addressed: TypeAlias = "tuple[str, Command]"
"""A command with the name of the training job that it concerns, or of the job: all of its training jobs."""


class Response:
    """Collects the commands in response to an event; shared by the parts of a job.

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
