"""The members of a cohort, and the arrays in which they train."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.commands import OwnCommand, Response
from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from freetrain_parsl.executor.jobs.commands import Command
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.jobs.training.progress import ProgressTracker

__all__ = [
    "CohortMember",
    "JoinCohort",
    "MemberGoal",
    "MemberResponse",
    "Refuse",
    "RunningArray",
    "TrainAlone",
]


@dataclass(frozen=True)
class TrainAlone(OwnCommand):
    """Train the training job by itself from now on, for this reason; empty: because there are enough nodes."""

    reason: str


@dataclass(frozen=True)
class JoinCohort(OwnCommand):
    """Train the training job with others of its structure, in another cohort, as it differs from those in this one."""

    structure: str
    differs: str


@dataclass(frozen=True)
class Refuse(OwnCommand):
    """Fuse no further training jobs of this key that are like these, for this reason.

    Parameters
    ----------
    reason
        Why.
    likenesses
        Of those that were tried, as in `TrainingRequest`.
    lasting
        Whether it is so on any node.
    """

    reason: str
    likenesses: frozenset[str]
    lasting: bool


class MemberGoal(Enum):
    """What a member is to do when it leaves its array without having finished."""

    TRAIN = "train in another array"
    REGROUP = "train with others of its structure, in another cohort"
    ALONE = "train alone, outside the cohort"
    CANCEL = "end"


class MemberResponse(Response):
    """Collects the commands that concern one member.

    Parameters
    ----------
    name
        The training job's.
    now
        Seconds.
    answering
        Gets this object with its first command.
    """

    def __init__(self, name: str, now: float, answering: list[MemberResponse]) -> None:
        super().__init__(now)
        self.name = name
        self._answering = answering

    def do(self, command: Command) -> None:
        """Add a command."""
        if self not in self._answering:
            self._answering.append(self)
        super().do(command)


@dataclass(eq=False)
class CohortMember:
    """A training job of a cohort that is not over.

    Parameters
    ----------
    request
        The submitted request.
    response
        Receives the commands that concern this training job.
    tracker
        Its progress.
    goal
        See `MemberGoal`.
    alone_because
        Why it is to train alone; empty: because there are enough nodes.
    began
        When its current fragment began, seconds; ``None``: it does not train.
    differs
        How it differs from the others of its cohort, once it is to leave them for another one.
    crashes
        Number of arrays that crashed while it trained in them.
    stall
        Why it makes no progress in its array, as it was last recorded; empty if it does.
    shares
        `base` and `turns` of its array, as they were last recorded.
    """

    request: TrainingRequest
    response: MemberResponse
    tracker: ProgressTracker
    goal: MemberGoal = MemberGoal.TRAIN
    alone_because: str = ""
    began: float | None = None
    differs: str = ""
    crashes: int = 0
    stall: str = ""
    shares: tuple[int, str] = (0, "")

    @property
    def name(self) -> str:
        """The training job's name."""
        return self.request.name

    @property
    def structure(self) -> str:
        """Equal for training jobs that may be fused; empty if it is not known yet."""
        return "" if self.tracker.latest is None else self.tracker.latest.structure

    @property
    def not_fused(self) -> str:
        """Why it is not fused with others of its array, as it has said; empty if it is."""
        return "" if self.tracker.latest is None else self.tracker.latest.not_fused

    def explain_stall(self, array: RunningArray, now: float) -> None:
        """Record if it has made no step for long in `array`, in which it trains."""
        steps = self.tracker.steps
        overdue = None if self.began is None else steps.overdue(self.began, now)
        self.note_stall("" if overdue is None else steps.sentence(overdue, f"{array.place}, in {array.name}"))

    def note_base(self, array: RunningArray) -> None:
        """Record what is in memory once for all members of `array`, in which it trains, if that has changed."""
        if self.began is not None and (array.base, array.turns) != self.shares:
            self.shares = array.base, array.turns
            self.response.log(record.BaseShared(self.name, array.name, len(array.members), *self.shares))

    def note_stall(self, reason: str) -> None:
        """Record why it makes no progress, if that has changed."""
        if reason != self.stall:
            self.stall = reason
            self.response.log(record.TrainingStalled(self.name, reason))

    @property
    def seconds_left(self) -> float | None:
        """Time that it still needs at its present rate, if both are known."""
        progress = self.tracker.latest
        if progress is None or not progress.rate or self.samples_left is None:
            return None
        return self.samples_left / progress.rate

    @property
    def samples_left(self) -> float | None:
        """Samples left to process, if their total is known."""
        progress = self.tracker.latest
        total = self.request.samples if progress is None else progress.samples_total or self.request.samples
        return None if total is None else max(0.0, total - (0 if progress is None else progress.samples))


@dataclass
class RunningArray:
    """Members that train fused, in one process.

    Parameters
    ----------
    slot, place
        The slot in which it runs, and its unit of the pool: a whole node, or the slot of a shared one.
    run
        Number of its run, unique within the driver.
    size
        Number of members that it can train, as far as it has found out.
    started
        When it was commanded, seconds.
    members
        The members that have not left it.
    releasing
        Those of them that were commanded to leave.
    pausing
        Whether all were commanded to leave.
    trains
        Whether a member has reported.
    shared
        Whether it has had several members.
    deadline
        When its process is killed unless it has ended, seconds.
    filling
        Whether it is to get members of other arrays, since it has fewer.
    base
        Bytes of the frozen base that is in memory once for all members.
    turns
        Why its members are not fused, but step in turns; empty: they are fused.
    leave_by
        When it pauses, because its node is taken, unless its members have changed to other arrays by then, seconds.
    """

    slot: str
    place: str
    run: int
    size: int
    started: float
    members: dict[str, CohortMember] = field(default_factory=dict)
    releasing: set[str] = field(default_factory=set)
    pausing: bool = False
    trains: bool = False
    shared: bool = False
    deadline: float | None = None
    filling: bool = True
    base: int = 0
    turns: str = ""
    leave_by: float | None = None

    @property
    def name(self) -> str:
        """Its name, for people."""
        return f"array-{self.run}"

    @property
    def staying(self) -> int:
        """Number of members that were not commanded to leave."""
        return 0 if self.pausing else len(self.members) - len(self.releasing)

    def takes_members(self, most: int) -> bool:
        """Return whether a member could begin in it at once, if it is to have no more than `most`."""
        begun = self.trains and all(member.began is not None for member in self.members.values())
        return begun and self.staying < min(self.size, most)
