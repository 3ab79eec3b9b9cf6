"""The messages between driver and slots.

They travel as frames over CurveZMQ with HTEX's own certificates, so both ends are known to each other. Payloads are
Parsl's serialisation, with the same trust as HTEX's own tasks and results; nothing else is ever unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from freetrain_parsl.protocol.codec import by_type
from freetrain_parsl.protocol.fields import Count, Duration, Integer, Limit, Name, Names, Text, Time
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Report, RunEnd

__all__ = [
    "TO_DRIVER",
    "TO_SLOT",
    "ChangeGroup",
    "Closing",
    "DriverHeartbeat",
    "Exit",
    "Hello",
    "Invalid",
    "PauseRun",
    "Place",
    "Probe",
    "Reconnected",
    "RunEnded",
    "RunReport",
    "SlotHeartbeat",
    "StartRun",
    "StartTask",
    "StoreReply",
    "StoreRequest",
    "TaskEnded",
    "ToDriver",
    "ToSlot",
    "Welcome",
]

Keys: TypeAlias = Annotated[tuple[Text, ...], Limit(lambda value: isinstance(value, list) and len(value) > 0)]
"""One or more."""

# ── both ways ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Probe:
    """Asks whether the other end hears this one; answered with the same. Needs no `Hello`."""

    pid: Count = 0


@dataclass(frozen=True)
class Reconnected:
    """A slot has connected anew; both ends send again what the other has not seen."""


# ── slot to driver ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Hello:
    """A slot introduces itself.

    Parameters
    ----------
    token
        Names the HTEX task behind it.
    node, block, pid
        Where it runs.
    versions
        Of its Python and packages, see `executor.environment`.
    fault
        Why its node cannot run trainings; empty: it can.
    """

    token: Name
    node: Name
    block: Name
    pid: Count
    versions: Names = field(default_factory=dict)
    fault: Text = ""


@dataclass(frozen=True)
class SlotHeartbeat:
    """A slot lives.

    Parameters
    ----------
    run, task
        Number of the run or task that it was given and has not ended.
    waited
        Seconds for which its training has done nothing but wait for the other members.
    """

    run: Count | None = None
    task: Count | None = None
    waited: Duration = 0.0


@dataclass(frozen=True)
class Closing:
    """The batch system has signalled that it takes the node.

    Parameters
    ----------
    closes_in
        Seconds until then.
    gone
        The slot has nothing to save and ends at once.
    """

    closes_in: Time
    gone: bool


@dataclass(frozen=True)
class RunReport:
    """What a run reports before its end.

    Parameters
    ----------
    training
        Its name.
    run
        Number of the `StartRun`.
    report
        The report.
    """

    training: Name
    run: Count
    report: Report


@dataclass(frozen=True)
class RunEnded:
    """A run is over.

    Parameters
    ----------
    training, run
        As in `RunReport`.
    end
        How it ended.
    payload
        The value of `RunFinished` or the exception of `RunFailed`, serialised; else empty.
    """

    training: Name
    run: Count
    end: RunEnd
    payload: bytes = b""


@dataclass(frozen=True)
class TaskEnded:
    """An ordinary task is over.

    Parameters
    ----------
    task
        Its number.
    failed
        Whether it raised.
    payload
        The value or the exception, serialised.
    """

    task: Count
    failed: bool
    payload: bytes


@dataclass(frozen=True)
class StoreRequest:
    """A call of a group's rendezvous store.

    Parameters
    ----------
    group
        Names the store.
    request
        Number of the call, for its `StoreReply`.
    operation, keys, amount, payload
        The call; `payload` is the value to set.
    timeout
        Seconds to wait for a key.
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
    """Stands for a message that could not be decoded; never sent."""

    reason: str


# ── driver to slot ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Welcome:
    """The slot is registered; its node closes in so many seconds, ``None`` if that is not known."""

    closes_in: Time | None = None


@dataclass(frozen=True)
class DriverHeartbeat:
    """The driver lives; answers a `SlotHeartbeat`."""


@dataclass(frozen=True)
class Place:
    """A process's place in a group.

    Parameters
    ----------
    generation
        Number of the group, unique for the driver.
    rank, size
        Its rank, from 0, and the number of members.
    """

    generation: Count
    rank: Count
    size: Count


@dataclass(frozen=True)
class StartRun:
    """Run a training.

    Parameters
    ----------
    training, run
        Its name, and the number of this command, which all messages about it repeat.
    options
        See `SessionOptions`.
    place
        In a new group; ``None``: as a newcomer to a group that trains already.
    meeting_timeout
        Seconds for which the members wait for each other when a group forms.
    payload
        The function with its arguments, serialised.
    """

    training: Name
    run: Count
    options: SessionOptions
    place: Place | None
    meeting_timeout: Duration
    payload: bytes


@dataclass(frozen=True)
class ChangeGroup:
    """Go on, in place, in another group.

    Parameters
    ----------
    training, run
        As in `StartRun`.
    generation
        The new group's.
    place
        This process's place in it; ``None``: it leaves, and its run ends.
    abort
        A peer has failed: leave the present group at once, without the others' agreement.
    """

    training: Name
    run: Count
    generation: Count
    place: Place | None
    abort: bool = False


@dataclass(frozen=True)
class PauseRun:
    """Stop at the next boundary, after a checkpoint; a newcomer just leaves.

    Parameters
    ----------
    training, run
        As in `StartRun`.
    """

    training: Name
    run: Count


@dataclass(frozen=True)
class StartTask:
    """Run an ordinary task: its number, and the function with its arguments, serialised."""

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
    number, payload
        Its result.
    """

    group: Name
    request: Count
    ok: bool
    number: Integer = 0
    payload: bytes = b""


@dataclass(frozen=True)
class Exit:
    """End the process.

    Parameters
    ----------
    now
        At once; else after the run has paused.
    node
        And the node's worker pool with it.
    """

    now: bool = False
    node: bool = False


ToDriver: TypeAlias = (
    Hello | SlotHeartbeat | Closing | RunReport | RunEnded | TaskEnded | StoreRequest | Reconnected | Probe | Invalid
)
ToSlot: TypeAlias = (
    Welcome | DriverHeartbeat | StartRun | ChangeGroup | PauseRun | StartTask | StoreReply | Exit | Reconnected | Probe
)

TO_DRIVER = by_type(Hello, SlotHeartbeat, Closing, RunReport, RunEnded, TaskEnded, StoreRequest, Reconnected, Probe)
"""What a slot may send."""

TO_SLOT = by_type(
    Welcome, DriverHeartbeat, StartRun, ChangeGroup, PauseRun, StartTask, StoreReply, Exit, Reconnected, Probe
)
"""What the driver may send."""
