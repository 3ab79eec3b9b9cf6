"""What a training that runs should do next to get to the nodes where it should be: pure decisions, no messages.

A change of nodes is carried out in place. Nodes that are wanted back are left at once; nodes that come are taken in
when their slots are warm, as many of them in one change as can be had without keeping those that are ready waiting.
A training that moves to other nodes altogether goes on until the slots there are ready, then through a group of both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.executor.trainings import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.executor.roster import Roster, Slot
    from freetrain_parsl.executor.trainings import Generation, Participant, Training, TrainingSettings

__all__ = ["Move", "absentees", "cut_off", "disconnection", "next_move", "survivors"]

# A member that has beaten so many seconds after another was stranded is alive: it was the connection that broke.
_ALIVE = 1.5
_PATIENCE = 5.0  # seconds for which the first newcomer that is ready waits for the others


@dataclass(frozen=True)
class Move:
    """A training's next step; all fields empty: none.

    Parameters
    ----------
    pause
        Save, and end on all slots.
    dismiss
        Newcomers to send away.
    start
        Slots to start newcomers on.
    ranks
        Slots of the next group, in order of rank.
    """

    pause: bool = False
    dismiss: tuple[str, ...] = ()
    start: tuple[Slot, ...] = ()
    ranks: tuple[str, ...] = ()


def next_move(training: Training, generation: Generation, roster: Roster, now: float) -> Move:
    """Decide for a training whose group is whole and has no order to carry out.

    Parameters
    ----------
    training, generation
        The training, and its present group.
    roster
        The slots that there are.
    now
        Seconds since the epoch.
    """
    if generation.pausing:
        return Move(dismiss=_names(training.newcomers()))
    taken = {slot.node for slot in roster.slots.values() if slot.leaving}
    wanted = training.desired - taken
    members = training.members()
    stay = [member for member in members if member.node in wanted]
    leaves = len(stay) < len(members)
    if not wanted or not training.in_place or not generation.reported:
        changes = wanted != generation.nodes if generation.reported else leaves
        return Move(pause=changes, dismiss=_names(training.newcomers()))
    outlook = _Outlook(training, wanted, roster)
    if not leaves:
        return outlook.move(_grow(stay, outlook, now))
    if len({member.node for member in stay}) >= training.request.min_nodes:
        newcomers = _names(outlook.ready)
        return outlook.move((*_names(stay), *newcomers))
    if any(member.node in taken for member in members) or not outlook.complete:
        return Move(pause=True, dismiss=_names(training.newcomers()))
    ranks: tuple[str, ...] = ()
    if not outlook.startable and not outlook.warming:
        keep = stay or [member for member in members if member.node == members[0].node]
        ranks = (*_names(keep), *_names(outlook.ready))
    return outlook.move(ranks)


def survivors(training: Training, *, with_newcomers: bool = True) -> tuple[str, ...]:
    """List the slots that can go on after a loss, in order of rank; empty if none of them has the state."""
    change = training.change
    if change is not None and not change.begun:
        members = [training.crew[slot] for slot in change.after.ranks if slot in training.crew]
        if not any(member.has_state for member in members):  # those who were to leave may still be there
            members = [training.crew[slot] for slot in change.before.ranks if slot in training.crew] + members
    else:
        members = training.members()
    members = [member for member in members if not member.cut_off]
    if not any(member.has_state for member in members):
        return ()
    return _names(member for member in members if with_newcomers or member.has_state)


def disconnection(
    training: Training, generation: Generation, roster: Roster, settings: TrainingSettings, now: float
) -> str | None:
    """Say why a group does not work though nobody knows of a loss: a connection is cut; ``None`` if it works."""
    change = training.change
    members = [one for one in training.crew.values() if one.role is Role.MEMBER]
    if not members or generation.lost:
        return None
    stranded = [one.stranded for one in members if one.stranded is not None]
    if stranded:
        complaint = next((f": {one.complaint}" for one in members if one.complaint), "")
        heard = min(roster.slots[one.slot].heard for one in members)
        if heard > min(stranded) + _ALIVE or now - min(stranded) > settings.loss_timeout:
            return f"its members lost each other, though all of them live{complaint}"
        return None
    limit = settings.loss_timeout + (0.0 if change is None else settings.meeting_timeout)
    if (change is None or not change.abort) and all(one.waited > limit for one in members):
        return f"its members did nothing but wait for each other for more than {limit:g} s"
    return None


def cut_off(ranks: Sequence[str], unreachable: Iterable[Iterable[int]]) -> tuple[str, ...]:
    """Choose slots without which all others of a group reach each other: few, and rather those that came last.

    Parameters
    ----------
    ranks
        The group's slots in order of rank.
    unreachable
        Pairs of ranks that do not reach each other.
    """
    pairs = {frozenset(pair) for pair in unreachable}
    pairs = {pair for pair in pairs if len(pair) == 2 and pair <= set(range(len(ranks)))}
    chosen: list[str] = []
    while pairs:
        counts = Counter(rank for pair in pairs for rank in pair)
        worst = max(counts, key=lambda rank: (counts[rank], rank))
        chosen.append(ranks[worst])
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(chosen)


def absentees(training: Training, visitors: frozenset[str], settings: TrainingSettings, now: float) -> tuple[str, ...]:
    """List the newcomers that hang: they have their order, and nothing else to do, but do not come to the meeting.

    Parameters
    ----------
    training
        One with an order that is being carried out.
    visitors
        Slots that have come to the meeting of the ordered group.
    settings, now
        Of the trainings; seconds since the epoch.
    """
    change = training.change
    if change is None or change.begun or now - change.after.began <= settings.loss_timeout:
        return ()
    newcomers = [one for one in training.crew.values() if one.slot in change.waiting and not one.has_state]
    return tuple(one.slot for one in newcomers if one.slot not in visitors and one.stranded is None)


class _Outlook:
    """What there is on the nodes that a training should have.

    Attributes
    ----------
    unwanted
        Newcomers on other nodes.
    startable
        Free slots where newcomers could be started.
    warming
        Newcomers that are not ready.
    ready
        Newcomers that can be taken in: all slots of their nodes are ready, or members already.
    complete
        No slot is missing, or busy with something else.
    """

    def __init__(self, training: Training, wanted: Iterable[str], roster: Roster) -> None:
        newcomers = training.newcomers()
        wanted = sorted(wanted)
        self.unwanted = _names(one for one in newcomers if one.node not in wanted)
        self.warming = [one for one in newcomers if one.node in wanted and one.ready is None]
        self.ready: list[Participant] = []
        self.startable: tuple[Slot, ...] = ()
        self.complete = True
        for node in wanted:
            slots = roster.complete_slots([node]) or []
            here = [training.crew[slot.name] for slot in slots if slot.name in training.crew]
            self.startable += tuple(slot for slot in slots if slot.busy is None)
            self.complete = (
                self.complete and bool(slots) and all(slot.busy is None or slot.name in training.crew for slot in slots)
            )
            arrived = [one for one in here if one.role is Role.NEWCOMER and one.ready is not None]
            if len(slots) == len(arrived) + sum(one.role is Role.MEMBER for one in here):
                self.ready += arrived

    def move(self, ranks: tuple[str, ...]) -> Move:
        """Warm up what can be, send away what is not wanted, and regroup if there are `ranks`."""
        return Move(dismiss=self.unwanted, start=self.startable, ranks=ranks)


def _grow(stay: list[Participant], outlook: _Outlook, now: float) -> tuple[str, ...]:
    """Give the ranks of a larger group, as soon as all newcomers are ready or the first has waited long enough."""
    if not outlook.ready:
        return ()
    waited = now - min(one.ready for one in outlook.ready if one.ready is not None)
    if outlook.warming and waited < _PATIENCE:
        return ()
    return (*_names(stay), *_names(outlook.ready))


def _names(participants: Iterable[Participant]) -> tuple[str, ...]:
    return tuple(one.slot for one in participants)
