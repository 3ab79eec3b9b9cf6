"""The states of a training job, its participants, the next change of them, and the detection of broken groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.planning.sizes import AllowedCounts

__all__ = [
    "TRANSITIONS",
    "Abandoning",
    "Ended",
    "Failure",
    "Goal",
    "GroupMembers",
    "NextChange",
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
    "disconnection",
    "fewest_to_exclude",
    "hanging_newcomers",
    "next_change",
    "stuck_members",
    "survivors",
]

# A member whose heartbeat arrives this many seconds after a peer's error is alive: the connection failed.
_ALIVE = 1.5
# A collective ends at once when its connections do; but a member that is connecting waits for up to 10 s.
_STUCK = 12.0
_PATIENCE = 5.0  # seconds for which the first ready newcomer waits for the others


class Role(Enum):
    """The role of a process in a training job."""

    MEMBER = "in the current group, or about to be in the next"
    NEWCOMER = "prepares to join the group"
    LEAVER = "was dismissed"


@dataclass
class Participant:
    """A slot that runs a training job.

    Parameters
    ----------
    slot, node, place
        The slot, its node, and the unit of the pool that it belongs to, or is.
    run
        Number of its run, unique within the driver.
    role
        See `Role`.
    has_state
        Whether it has the training job's state and could transfer it to others.
    began
        When it was commanded to run the training job, seconds.
    ready
        When it reported, as a newcomer, that it lacks only the state, seconds.
    group_failed
        When it reported that a peer failed, seconds; ``None`` while it trains.
    complaint
        The error of its collective at that time.
    waited
        Seconds for which it has only waited for the other members, according to its last heartbeat.
    deadline
        When its process is killed unless it has ended or joined the next group, seconds.
    unreachable
        Whether other members of its group cannot reach it and continue without it.
    """

    slot: str
    node: str
    place: str
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
    """The members of a training job's group, as the driver knows them; a fragment from its first step on.

    Parameters
    ----------
    number
        The group's number, unique within the driver.
    nodes
        Their units: whole nodes, or slots of shared ones.
    ranks
        Their slots, in order of rank.
    began
        When it was commanded, seconds.
    replicas
        Number of replicas of a sharded state into which they are divided, by consecutive ranks.
    running
        The slots whose run has not ended.
    lost
        The slots whose process has failed or was taken -> their nodes.
    """

    number: int
    nodes: frozenset[str]
    ranks: tuple[str, ...]
    began: float
    replicas: int = 1
    running: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)

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
    """The goal of a training job that has not ended."""

    TRAIN = "run on the nodes that it is assigned"
    HOLD = "wait until the checkpoint directory can be used"
    CANCEL = "save its state and end"


@dataclass
class Waiting:
    """The training job has had no group since `since`, in seconds."""

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
    transferred
        Longest part of it in which the state was moved, as reported by a member, seconds.
    moved
        Bytes that members have received from others, as far as they have reported.
    begun
        Whether a member has reported: the training job continues in the new group.
    answered
        Whether a member has come to the meeting of the new group, or of one that did not form, since the failure.
    lost_leavers
        Failures of members that were to leave, and when they were noticed, in seconds.
    """

    before: GroupMembers
    after: GroupMembers
    failure: bool
    grows: bool
    awaited: set[str]
    pauses: bool = False
    paused: float = 0.0
    transferred: float = 0.0
    moved: int = 0
    begun: bool = False
    answered: bool = False
    lost_leavers: list[tuple[Failure, float]] = field(default_factory=list)

    @property
    def group(self) -> GroupMembers:
        """The current group."""
        return self.after if self.begun else self.before


@dataclass
class Pausing:
    """The members save the state and end.

    Parameters
    ----------
    group
        The group.
    reported
        Whether it had started training.
    lost_leavers
        As in `Regrouping`: those of a change that had not begun.
    """

    group: GroupMembers
    reported: bool
    lost_leavers: list[tuple[Failure, float]] = field(default_factory=list)


@dataclass
class Abandoning:
    """The members end without saving; the training job restarts from its newest checkpoint."""

    group: GroupMembers


@dataclass
class Ended:
    """The training job has finished or failed; the last members of `group` may still be ending."""

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
        The phase in which the failures happened, and which continues until the response.
    failures
        Failures without a response yet.
    latest
        When the last of them was detected, seconds.
    """

    phase: Phase
    failures: list[Failure]
    latest: float


State: TypeAlias = Phase | Recovering


@dataclass(frozen=True)
class NextChange:
    """The next change towards the assigned nodes; all fields empty: no change.

    Parameters
    ----------
    pause
        Whether all members save and end.
    dismiss
        Newcomers to dismiss.
    start
        Slots on which to start newcomers.
    ranks
        Slots of the next group, in order of rank.
    """

    pause: bool = False
    dismiss: tuple[str, ...] = ()
    start: tuple[Slot, ...] = ()
    ranks: tuple[str, ...] = ()


def next_change(
    participants: Mapping[str, Participant],
    group: GroupMembers,
    desired: frozenset[str],
    registry: SlotRegistry,
    *,
    least: int,
    allowed: AllowedCounts,
    now: float,
) -> NextChange:
    """Decide the next change of a training job that runs, can change in place, and is not changing.

    Nodes that are to be released are left at once. Added nodes join when their slots are ready, as many as possible in
    one change without making ready slots wait long. A training job that moves to entirely different nodes continues
    until the slots there are ready, then changes through an intermediate group of both. If no group can have processes
    on both, it pauses with a checkpoint and starts there.

    Parameters
    ----------
    participants
        Slot -> participant.
    group
        The current group.
    desired
        Units that are assigned to the training job: whole nodes, or slots of shared ones.
    registry
        The connected slots.
    least
        The minimum number of units of the training job.
    allowed
        The numbers of processes on which its model can run.
    now
        Seconds.
    """
    closing = registry.closing(desired | group.nodes)
    wanted = desired - closing
    members = members_of(participants, group)
    stay = [member for member in members if member.place in wanted]
    newcomers = [one for one in participants.values() if one.role is Role.NEWCOMER]
    if not wanted:
        return NextChange(pause=True, dismiss=_names(newcomers))
    there = _Availability(participants, wanted, registry)
    if len(stay) == len(members):
        return there.change(_grow(stay, there, allowed, now))
    enough = len({member.place for member in stay}) >= least
    if enough and (ranks := there.joined_by(stay, allowed)):
        return there.change(ranks)
    apart = len(registry.transports_on({member.place for member in members} | wanted)) > 1
    if apart or any(member.place in closing for member in members) or not there.complete:
        return NextChange(pause=True, dismiss=_names(newcomers))
    if there.startable or there.preparing:
        return there.change(())
    keep = stay or [member for member in members if member.place == members[0].place]
    if len(ranks := there.joined_by(keep, allowed)) > len(keep):
        return there.change(ranks)
    return NextChange(pause=True, dismiss=_names(newcomers))


def members_of(participants: Mapping[str, Participant], group: GroupMembers) -> list[Participant]:
    """Return the members of a group whose run has not ended, in order of rank."""
    return [participants[s] for s in group.ranks if s in participants and participants[s].role is Role.MEMBER]


def survivors(
    participants: Mapping[str, Participant],
    group: GroupMembers,
    change: Regrouping | None,
    *,
    with_newcomers: bool,
    allowed: AllowedCounts,
) -> tuple[str, ...]:
    """Return the slots that can continue after a failure, in order of rank; empty if none of them has the state.

    Newcomers continue with them, with `with_newcomers` and if the number is `allowed` then.
    """
    if change is not None and not change.begun:
        members = [participants[slot] for slot in change.after.ranks if slot in participants]
        if not any(member.has_state for member in members):  # members that should leave may still be running
            members = [participants[slot] for slot in change.before.ranks if slot in participants] + members
    else:
        members = members_of(participants, group)
    members = [member for member in members if not member.unreachable]
    if not any(member.has_state for member in members):
        return ()
    if with_newcomers and len(members) in allowed:
        return _names(members)
    old = _names(member for member in members if member.has_state)
    return old if len(old) in allowed else ()


def disconnection(
    participants: Mapping[str, Participant],
    change: Regrouping | None,
    registry: SlotRegistry,
    *,
    peer_timeout: float,
    meeting_timeout: float,
    now: float,
) -> str | None:
    """Return why a group makes no progress without a known failure: a broken connection; ``None`` if it works."""
    members = [one for one in participants.values() if one.role is Role.MEMBER]
    if not members:
        return None
    failed = [one.group_failed for one in members if one.group_failed is not None]
    if failed:
        complaint = next((f": {one.complaint}" for one in members if one.complaint), "")
        heard = min(registry.slots[one.slot].heard for one in members)
        if heard > min(failed) + _ALIVE or now - min(failed) > peer_timeout:
            return f"its members lost their connections, though all of them are alive{complaint}"
        return None
    limit = peer_timeout + (0.0 if change is None else meeting_timeout)
    if (change is None or not change.failure) and all(one.waited > limit for one in members):
        return f"its members only waited for each other for more than {limit:g} s"
    return None


def fewest_to_exclude(
    ranks: Sequence[str], unreachable: Iterable[Sequence[int]], with_state: Collection[str] = ()
) -> tuple[str, ...]:
    """Choose a small set of slots without which all others of a group can reach each other; prefers high ranks.

    Parameters
    ----------
    ranks
        The group's slots in order of rank.
    unreachable
        Pairs of ranks that cannot reach each other.
    with_state
        Slots that have the training job's state; one of them is kept, because the state would be lost with the last.
    """
    holders = {rank for rank, slot in enumerate(ranks) if slot in with_state}
    pairs = {frozenset(pair) for pair in unreachable}
    pairs = {pair for pair in pairs if len(pair) == 2 and pair <= set(range(len(ranks)))}
    chosen: list[str] = []
    while pairs:
        counts = Counter(rank for pair in pairs for rank in pair)
        candidates = counts.keys() - holders if len(holders) == 1 else counts.keys()
        worst = max(candidates, key=lambda rank: (counts[rank], rank))
        chosen.append(ranks[worst])
        holders.discard(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(chosen)


def hanging_newcomers(
    participants: Mapping[str, Participant], change: Regrouping, arrived: frozenset[str]
) -> tuple[str, ...]:
    """Return the newcomers that hang: they only have to join the rendezvous, and have not.

    Parameters
    ----------
    participants
        Slot -> participant.
    change
        The current change, which has taken longer than any newcomer needs.
    arrived
        Slots that have joined the rendezvous of the new group.
    """
    newcomers = [one for one in participants.values() if one.slot in change.awaited and not one.has_state]
    return tuple(one.slot for one in newcomers if one.slot not in arrived and one.group_failed is None)


def stuck_members(
    participants: Mapping[str, Participant], change: Regrouping, arrived: frozenset[str], now: float
) -> tuple[str, ...]:
    """Return the members that still wait in a collective of the group that they were commanded to leave at once.

    Its connections have been shut down, so that nothing wakes them: gloo has lost a message (torch 2.13). With several
    replicas a member may wait for another one of its own replica, which continues.
    """
    if not change.failure or change.before.replicas > 1 or now - change.after.began <= _STUCK:
        return ()
    members = [one for one in participants.values() if one.slot in change.awaited - arrived and one.has_state]
    return tuple(one.slot for one in members if one.group_failed is None and one.waited > _STUCK)


class _Availability:
    """The state of the units that are assigned to a training job.

    Attributes
    ----------
    unwanted
        Newcomers on other units.
    startable
        Idle slots on which newcomers can be started.
    preparing
        Newcomers that are not ready yet.
    ready
        Newcomers that can join: all slots of their units are ready or already members.
    complete
        Whether no slot is missing or busy with other work.
    """

    def __init__(self, participants: Mapping[str, Participant], wanted: Iterable[str], registry: SlotRegistry) -> None:
        newcomers = [one for one in participants.values() if one.role is Role.NEWCOMER]
        wanted = frozenset(wanted)
        self.unwanted = _names(one for one in newcomers if one.place not in wanted)
        self.preparing = [one for one in newcomers if one.place in wanted and one.ready is None]
        self.ready: list[Participant] = []
        startable: list[Slot] = []
        self.complete = True
        for place in sorted(wanted):
            slots = registry.complete_slots((place,)) or ()
            here = [participants[slot.name] for slot in slots if slot.name in participants]
            startable += [slot for slot in slots if slot.busy is None]
            self.complete &= bool(slots) and all(slot.busy is None or slot.name in participants for slot in slots)
            arrived = [one for one in here if one.role is Role.NEWCOMER and one.ready is not None]
            if len(slots) == len(arrived) + sum(one.role is Role.MEMBER for one in here):
                self.ready += arrived
        self.startable = tuple(startable)

    def change(self, ranks: tuple[str, ...]) -> NextChange:
        """Start newcomers where possible, dismiss those that are not wanted, and regroup if there are `ranks`."""
        return NextChange(dismiss=self.unwanted, start=self.startable, ranks=ranks)

    def joined_by(self, stay: Sequence[Participant], allowed: AllowedCounts) -> tuple[str, ...]:
        """Return the slots of those that stay, and of the ready newcomers on as many units as the model allows.

        Empty: no such number is allowed.
        """
        for units in range(len(places := list(dict.fromkeys(one.place for one in self.ready))), -1, -1):
            ranks = (*_names(stay), *_names(one for one in self.ready if one.place in places[:units]))
            if len(ranks) in allowed:
                return ranks
        return ()


def _grow(stay: list[Participant], there: _Availability, allowed: AllowedCounts, now: float) -> tuple[str, ...]:
    """Return the ranks of a larger group, once all newcomers are ready or the first has waited long enough."""
    if not there.ready:
        return ()
    waited = now - min(one.ready for one in there.ready if one.ready is not None)
    if there.preparing and waited < _PATIENCE:
        return ()
    ranks = there.joined_by(stay, allowed)
    return ranks if len(ranks) > len(stay) else ()


def _names(participants: Iterable[Participant]) -> tuple[str, ...]:
    return tuple(one.slot for one in participants)
