"""The messages between driver and slots.

They are sent as frames over CurveZMQ with HTEX's certificates, so both ends are authenticated. Payloads use Parsl's
serialization and are trusted as much as HTEX's own tasks and results; nothing else is unpickled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from freetrain_parsl.protocol.codec import Count, Duration, Integer, Limit, Name, Names, Text, Time, by_type
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Report, RunEnd

__all__ = [
    "TO_DRIVER",
    "TO_SLOT",
    "ChangeBatch",
    "ChangeGroup",
    "Closing",
    "DriverHeartbeat",
    "Exit",
    "FilesLoaded",
    "Hello",
    "Invalid",
    "Output",
    "PauseRun",
    "Place",
    "Probe",
    "Reconnected",
    "RunEnded",
    "RunMessage",
    "RunReport",
    "RunStart",
    "SlotHeartbeat",
    "StartRun",
    "StartTask",
    "StoreReply",
    "StoreRequest",
    "StoredValue",
    "TaskEnded",
    "ToDriver",
    "ToSlot",
    "Values",
    "Welcome",
    "WithFunction",
]

_SOURCE = re.compile(r"!?(\d{1,7}|\?)")
_HEX = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{32})?")

Source: TypeAlias = Annotated[str, Limit(lambda value: isinstance(value, str) and _SOURCE.fullmatch(value) is not None)]
"""Which process of a job has printed: its rank, ``?`` while it joins; with ``!`` the exception that ends it."""

Hex: TypeAlias = Annotated[str, Limit(lambda value: isinstance(value, str) and _HEX.fullmatch(value) is not None)]
"""Hexadecimal digits, 32 or 64."""

Keys: TypeAlias = Annotated[tuple[Text, ...], Limit(lambda value: isinstance(value, list) and len(value) > 0)]
"""One or more."""

# ── both ways ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Probe:
    """Connectivity check, answered with the same message; needs no `Hello`."""

    pid: Count = 0


@dataclass(frozen=True)
class Reconnected:
    """A slot has reconnected; both ends resend what the other has not received."""


@dataclass(frozen=True)
class RunMessage:
    """A message about a run, either way. Kinds of jobs add their own, see `freetrain_parsl.executor.jobs.port`.

    Parameters
    ----------
    training
        Name of the training job, or of the job whose training jobs share the run.
    run
        Number of the `RunStart`, unique within the driver.
    """

    training: Name
    run: Count


@dataclass(frozen=True)
class RunStart(RunMessage):
    """A command that begins a run in an idle slot."""


@dataclass(frozen=True)
class WithFunction(RunMessage):
    """A command with a training job's function.

    Parameters
    ----------
    options
        See `SessionOptions`.
    payload
        The serialized function and its arguments.
    """

    options: SessionOptions
    payload: bytes


# ── slot to driver ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Hello:
    """A slot introduces itself.

    Parameters
    ----------
    token
        Identifies the HTEX task behind it.
    node, block, pid
        Where it runs.
    versions
        Versions of its Python and packages, see `executor.environment`.
    fault
        Why its node cannot run training jobs; empty if it can.
    waited
        Seconds for which the imports of its node have waited for files.
    image
        Name of the image that its node was started from; empty: none.
    image_fault
        Why the image that its node was to be started from was not used.
    """

    token: Name
    node: Name
    block: Name
    pid: Count
    versions: Names = field(default_factory=dict)
    fault: Text = ""
    waited: Duration = 0.0
    image: Text = ""
    image_fault: Text = ""


@dataclass(frozen=True)
class SlotHeartbeat:
    """A slot is alive.

    Parameters
    ----------
    run, task
        Number of its current run or task.
    waited
        Seconds for which its training job has only waited for the other members.
    """

    run: Count | None = None
    task: Count | None = None
    waited: Duration = 0.0


@dataclass(frozen=True)
class Closing:
    """The batch system has signalled that it is reclaiming the node.

    Parameters
    ----------
    closes_in
        Seconds until it does.
    gone
        Whether the slot ends at once because it has nothing to save.
    """

    closes_in: Time
    gone: bool


@dataclass(frozen=True)
class RunReport(RunMessage):
    """A report of a run before its end."""

    report: Report


@dataclass(frozen=True)
class StoredValue:
    """A serialized value in a file, see `freetrain_parsl.executor.payloads.value_files`.

    Parameters
    ----------
    name
        Name of the file.
    size
        Its size in bytes.
    digest
        Its SHA-256.
    """

    name: Hex
    size: Count
    digest: Hex


@dataclass(frozen=True)
class RunEnded(RunMessage):
    """A run has ended.

    Parameters
    ----------
    end
        How it ended.
    payload
        The serialized value of `RunFinished` or exception of `RunFailed`; otherwise empty.
    stored
        The file of a value that is too large for a message.
    """

    end: RunEnd
    payload: bytes = b""
    stored: StoredValue | None = None


@dataclass(frozen=True)
class Output:
    """What a training job has printed in a slot.

    Parameters
    ----------
    training
        Its name; of one of them, if several share the run.
    source
        The process.
    payload
        Complete lines, UTF-8.
    """

    training: Name
    source: Source
    payload: bytes = b""


@dataclass(frozen=True)
class Values:
    """Values of a training job for its trackers.

    Parameters
    ----------
    training
        Its name; of one of them, if several share the run.
    rows
        As in `Logged`.
    """

    training: Name
    rows: tuple[Text, ...]


@dataclass(frozen=True)
class FilesLoaded:
    """What the first member of a training job has loaded until its first report, where the executor uses it.

    Parameters
    ----------
    payload
        Names of files, see `executor.slot.loaded_files`.
    """

    payload: bytes


@dataclass(frozen=True)
class TaskEnded:
    """An ordinary task has ended.

    Parameters
    ----------
    task
        Its number.
    failed
        Whether it raised an exception.
    payload
        The serialized value or exception.
    stored
        As in `RunEnded`.
    """

    task: Count
    failed: bool
    payload: bytes
    stored: StoredValue | None = None


@dataclass(frozen=True)
class StoreRequest:
    """A call to the rendezvous store of a group.

    Parameters
    ----------
    group
        Identifies the store.
    request
        Number of the call, for its `StoreReply`.
    operation, keys, amount, payload
        The call; `payload` is the value to set. Only `get` and `check` take several keys.
    timeout
        Seconds to wait for the keys.
    """

    group: Name
    request: Count
    operation: Literal["set", "get", "add", "check", "delete"]
    keys: Keys
    timeout: Duration
    amount: Integer = 0
    payload: bytes = b""


@dataclass(frozen=True)
class Invalid:
    """Placeholder for a message that could not be decoded; never sent."""

    reason: str


# ── driver to slot ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Welcome:
    """The slot is registered; its node closes in `closes_in` seconds, ``None`` if that is unknown."""

    closes_in: Time | None = None


@dataclass(frozen=True)
class DriverHeartbeat:
    """The driver is alive; answers a `SlotHeartbeat`."""


@dataclass(frozen=True)
class Place:
    """A process's place in a group.

    Parameters
    ----------
    generation
        Number of the group, unique within the driver.
    rank, size
        Its rank, from 0, and the number of members.
    replicas
        Number of replicas of a sharded state into which they are divided, by consecutive ranks.
    """

    generation: Count
    rank: Count
    size: Count
    replicas: Count = 1


@dataclass(frozen=True)
class StartRun(RunStart, WithFunction):
    """Run a training job.

    Parameters
    ----------
    place
        Place in a new group; ``None``: as a newcomer to a group that is already training.
    meeting_timeout
        Seconds for which the members wait for each other when a group is formed.
    next_size
        For a newcomer: how many members its replica, or the group, will have if the plan stays as it is.
    """

    place: Place | None
    meeting_timeout: Duration
    next_size: Count | None = None


@dataclass(frozen=True)
class ChangeGroup(RunMessage):
    """Change to another group in place.

    Parameters
    ----------
    generation
        Number of the new group.
    place
        This process's place in it; ``None``: the process leaves, and its run ends.
    abort
        A peer has failed: leave the current group at once, without agreeing on a boundary.
    """

    generation: Count
    place: Place | None
    abort: bool = False


@dataclass(frozen=True)
class ChangeBatch(RunMessage):
    """Change the batch size at the next boundary; sent to the first member, which tells the others there."""

    size: Count


@dataclass(frozen=True)
class PauseRun(RunMessage):
    """Stop at the next boundary, after a checkpoint; a newcomer stops at once; in an array, all members stop."""


@dataclass(frozen=True)
class StartTask:
    """Run an ordinary task: its number, and the serialized function with its arguments."""

    task: Count
    payload: bytes


@dataclass(frozen=True)
class StoreReply:
    """The result of a `StoreRequest`.

    Parameters
    ----------
    group, request
        As in the request.
    ok
        Whether the call succeeded.
    number
        The result of `add`, `check` and `delete`.
    sizes, payload
        The result of `get`: the lengths of the values in bytes, and the values one after another.
    """

    group: Name
    request: Count
    ok: bool
    number: Integer = 0
    sizes: tuple[Count, ...] = ()
    payload: bytes = b""


@dataclass(frozen=True)
class Exit:
    """End the process.

    Parameters
    ----------
    now
        At once, instead of after the run has paused.
    node
        Also end the node's worker pool.
    """

    now: bool = False
    node: bool = False


ToDriver: TypeAlias = (
    Hello
    | SlotHeartbeat
    | Closing
    | RunMessage
    | Output
    | Values
    | FilesLoaded
    | TaskEnded
    | StoreRequest
    | Reconnected
    | Probe
    | Invalid
)
ToSlot: TypeAlias = Welcome | DriverHeartbeat | RunMessage | StartTask | StoreReply | Exit | Reconnected | Probe

TO_DRIVER = by_type(
    Hello,
    SlotHeartbeat,
    Closing,
    RunReport,
    RunEnded,
    Output,
    Values,
    FilesLoaded,
    TaskEnded,
    StoreRequest,
    Reconnected,
    Probe,
)
"""Messages that a slot may send, without those of kinds of jobs."""

TO_SLOT = by_type(
    Welcome,
    DriverHeartbeat,
    StartRun,
    ChangeGroup,
    ChangeBatch,
    PauseRun,
    StartTask,
    StoreReply,
    Exit,
    Reconnected,
    Probe,
)
"""Messages that the driver may send, without those of kinds of jobs."""
