"""The states of a training, and its participants: the processes that run it."""

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
    "GroupMembers",
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
    """The role of a process in a training."""

    MEMBER = "in the current group, or about to be in the next"
    NEWCOMER = "prepares to join the group"
    LEAVER = "was dismissed"


@dataclass
class Participant:
    """A slot that runs a training.

    Parameters
    ----------
    slot, node
        The slot and its node.
    run
        Number of its run, unique within the driver.
    role
        See `Role`.
    has_state
        Whether it has the training's state and could transfer it to others.
    began
        When it was commanded to run the training, seconds.
    ready
        When it reported, as a newcomer, that it lacks only the state, seconds.
    group_failed
        When it reported that a peer failed, seconds; ``None`` while it trains.
    complaint
        The error of its collective at that time.
    waited
        Seconds for which it has only waited for the other members, as of its last heartbeat.
    deadline
        When its process is killed unless it has ended or joined the next group, seconds.
    unreachable
        Whether other members of its group cannot reach it and continue without it.
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
        """Record that it is a member of a working group."""
        self.role, self.has_state = Role.MEMBER, True
        self.group_failed, self.waited, self.deadline = None, 0.0, None


@dataclass
class GroupMembers:
    """The members of a training's group, as the driver knows them; a fragment from its first step on.

    Parameters
    ----------
    number
        The group's number, unique within the driver.
    nodes
        Their nodes.
    ranks
        Their slots, in order of rank.
    began
        When it was commanded, seconds.
    running
        The slots whose run has not ended.
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
    """The failure of a member; a `crash` is one that the batch system did not cause."""

    reason: str
    crash: bool


class Goal(Enum):
    """The goal of a training that has not ended."""

    TRAIN = "run on the nodes that it is assigned"
    HOLD = "wait until the checkpoint directory can be used"
    CANCEL = "save its state and end"


@dataclass
class Waiting:
    """The training has had no group since `since`, in seconds."""

    since: float


@dataclass
class Starting:
    """A new group is starting, from the newest checkpoint if there is one, and has not reported yet."""

    group: GroupMembers


@dataclass
class Running:
    """The group trains."""

    group: GroupMembers


@dataclass
class Regrouping:
    """The members change from one group to another in place.

    Parameters
    ----------
    before, after
        The groups.
    failure
        Whether its cause is the failure of a member.
    grows
        Whether newcomers join.
    awaited
        Slots of the new group that have not reported that they train in it.
    pauses
        Whether the members pause as soon as they are in the new group.
    paused
        Longest pause reported by a member, seconds.
    begun
        Whether a member has reported: the training continues in the new group.
    """

    before: GroupMembers
    after: GroupMembers
    failure: bool
    grows: bool
    awaited: set[str]
    pauses: bool = False
    paused: float = 0.0
    begun: bool = False

    @property
    def group(self) -> GroupMembers:
        """The current group."""
        return self.after if self.begun else self.before


@dataclass
class Pausing:
    """The members save the state and end; `reported`: the group had started training."""

    group: GroupMembers
    reported: bool


@dataclass
class Abandoning:
    """The members end without saving; the training restarts from its newest checkpoint."""

    group: GroupMembers


@dataclass
class Ended:
    """The training has finished or failed; the last members of `group` may still be ending."""

    group: GroupMembers | None


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
    """Members have failed; more may follow, so the response is briefly delayed.

    Parameters
    ----------
    phase
        The phase in which the failures happened, and which continues meanwhile.
    failures
        Failures without a response yet.
    latest
        When the last of them was detected, seconds.
    """

    phase: Phase
    failures: list[Failure]
    latest: float


State: TypeAlias = Phase | Recovering
