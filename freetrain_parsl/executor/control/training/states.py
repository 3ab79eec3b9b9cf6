"""The states of a training, and the processes that run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "TRANSITIONS",
    "Abandoning",
    "Ended",
    "Failure",
    "Goal",
    "Group",
    "Participant",
    "Pausing",
    "Phase",
    "Recovering",
    "Regrouping",
    "Role",
    "Running",
    "Starting",
    "State",
    "Waiting",
]


class Role(Enum):
    """What a process that runs a training is to it."""

    MEMBER = "in the present group, or about to be in the next"
    NEWCOMER = "prepares to join the group"
    LEAVER = "was told to leave"


@dataclass
class Participant:
    """A slot that runs a training.

    Parameters
    ----------
    slot, node
        Where.
    run
        Number of the command by which it runs it, unique for the driver.
    role
        See `Role`.
    has_state
        Whether it could transfer the training's state to others.
    began
        When it was told to run the training, seconds.
    ready
        When a newcomer reported that it lacks nothing but the state, seconds.
    group_failed
        When it reported that a peer failed, seconds; ``None`` while it trains.
    complaint
        The error of its collective then.
    waited
        Seconds for which it has done nothing but wait for the other members, by its last heartbeat.
    deadline
        By when it must have ended, or have joined the next group, or its process is killed; seconds.
    unreachable
        Whether others of its group do not reach it: they go on without it.
    """

    slot: str
    node: str
    run: int
    role: Role
    has_state: bool = False
    began: float = 0.0
    ready: float | None = None
    group_failed: float | None = None
    complaint: str = ""
    waited: float = 0.0
    deadline: float | None = None
    unreachable: bool = False

    def trains(self) -> None:
        """Note that it is a member of a group that works."""
        self.role, self.has_state = Role.MEMBER, True
        self.group_failed, self.waited, self.deadline = None, 0.0, None


@dataclass
class Group:
    """A process group of a training; from its first step on, a fragment.

    Parameters
    ----------
    number
        Unique for the driver.
    nodes
        Where its members are.
    ranks
        Their slots in order of rank.
    began
        When it was ordered, seconds.
    running
        Those of its slots whose run has not ended.
    """

    number: int
    nodes: frozenset[str]
    ranks: tuple[str, ...]
    began: float
    running: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.running.update(self.ranks)

    @property
    def first(self) -> str:
        """The slot of rank 0."""
        return self.ranks[0]


@dataclass(frozen=True)
class Failure:
    """A member that is gone; a `crash` is one that the batch system did not cause."""

    reason: str
    crash: bool


class Goal(Enum):
    """What a training that has not ended is to do."""

    TRAIN = "run on the nodes that it is assigned"
    HOLD = "wait until the checkpoint directory can be used"
    CANCEL = "save its state and end"


@dataclass
class Waiting:
    """It has no group; `since` when, seconds."""

    since: float


@dataclass
class Starting:
    """A new group starts, from the newest checkpoint if there is one, and has not reported yet."""

    group: Group


@dataclass
class Running:
    """The group trains."""

    group: Group


@dataclass
class Regrouping:
    """The members change, in place, from one group to another.

    Parameters
    ----------
    before, after
        The groups.
    failure
        Whether it answers the failure of a member.
    grows
        Whether it takes newcomers in.
    awaited
        Slots of the new group that have not reported that they train in it.
    pauses
        Whether the members pause as soon as they are in the new group.
    paused
        Longest pause that one of them reported, seconds.
    begun
        Whether one of them has: the training goes on in the new group.
    """

    before: Group
    after: Group
    failure: bool
    grows: bool
    awaited: set[str]
    pauses: bool = False
    paused: float = 0.0
    begun: bool = False

    @property
    def group(self) -> Group:
        """The present group."""
        return self.after if self.begun else self.before


@dataclass
class Pausing:
    """The members save the state and end; `reported`: the group had begun to train."""

    group: Group
    reported: bool


@dataclass
class Abandoning:
    """The members end without saving: the training starts again from its newest checkpoint."""

    group: Group


@dataclass
class Ended:
    """It has finished or failed; the last members of `group` may still be ending."""

    group: Group | None


Phase: TypeAlias = Waiting | Starting | Running | Regrouping | Pausing | Abandoning | Ended


TRANSITIONS: Mapping[type, frozenset[type]] = {
    Waiting: frozenset({Starting, Ended}),
    Starting: frozenset({Running, Pausing, Abandoning, Waiting, Ended}),
    Running: frozenset({Regrouping, Pausing, Abandoning, Waiting, Ended}),
    Regrouping: frozenset({Running}),
    Pausing: frozenset({Regrouping, Abandoning, Waiting, Ended}),
    Abandoning: frozenset({Waiting, Ended}),
    Ended: frozenset(),
}
"""Phase -> the phases that may follow; `docs/explanation/life-of-a-training.md` shows them."""


@dataclass
class Recovering:
    """Members have failed; more may be about to, so the answer waits for a moment.

    Parameters
    ----------
    phase
        In which it happened, and which goes on meanwhile.
    failures
        Not answered yet.
    latest
        When the last of them was noticed, seconds.
    """

    phase: Phase
    failures: list[Failure]
    latest: float


State: TypeAlias = Phase | Recovering
