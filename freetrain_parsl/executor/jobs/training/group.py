"""The processes of a training job and the group that they form: how it starts, changes in place, pauses and ends.

What happens, and when, is decided by `machine`; every change of phase is made here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.executor.jobs.training.states import (
    TRANSITIONS,
    Abandoning,
    Ended,
    GroupMembers,
    Participant,
    Pausing,
    Regrouping,
    Role,
    Running,
    Starting,
    Waiting,
    members_of,
)
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import ChangeBatch, ChangeGroup, PauseRun, Place, StartRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from freetrain_parsl.executor.driver.slot_registry import Slot
    from freetrain_parsl.executor.jobs.commands import Response
    from freetrain_parsl.executor.jobs.request import Limits, TrainingRequest
    from freetrain_parsl.executor.jobs.training.progress import PlannerView
    from freetrain_parsl.executor.jobs.training.states import Failure, Phase
    from freetrain_parsl.protocol.reports import Joined

__all__ = ["TrainingProcesses"]

_LEFT_BEHIND = 1.0  # seconds within which members come to the next group once one that leaves has nothing left to give


class TrainingProcesses:
    """The participants of one training job, and its phase; it reports the costs of changes to `PlannerView`.

    Attributes
    ----------
    participants
        Slot -> participant.
    arrived
        Slots at the meeting of the next group.
    """

    def __init__(
        self,
        request: TrainingRequest,
        limits: Limits,
        numbers: Iterator[int],
        response: Response,
        planner: PlannerView,
        counted_seconds: Callable[[], float | None],
    ) -> None:
        self.participants: dict[str, Participant] = {}
        self.arrived: frozenset[str] = frozenset()
        self._name, self._options = request.name, request.options
        self._meeting = limits.meeting_timeout
        self._leave_timeout = limits.peer_timeout
        self._change_timeout = limits.peer_timeout + limits.meeting_timeout
        self._silence_timeout = limits.silence_timeout
        self._numbers = numbers
        self._response = response
        self._planner = planner
        self._counted_seconds = counted_seconds
        self._phase: Phase = Waiting(response.now)

    # The state.

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._phase

    def _enter(self, phase: Phase) -> None:
        before, self._phase = type(self._phase), phase
        assert type(phase) in TRANSITIONS[before] or type(phase) is before, f"{before.__name__} to {phase}"

    @property
    def group(self) -> GroupMembers | None:
        """The current group."""
        return None if isinstance(self._phase, Waiting) else self._phase.group

    @property
    def change(self) -> Regrouping | None:
        """The change in place that is in progress."""
        return self._phase if isinstance(self._phase, Regrouping) else None

    @property
    def next_group(self) -> GroupMembers | None:
        """The group that is being formed."""
        return None if self.change is None else self.change.after

    @property
    def members(self) -> list[Participant]:
        """The members of the current group whose run has not ended, in order of rank."""
        return [] if self.group is None else members_of(self.participants, self.group)

    @property
    def newcomers(self) -> list[Participant]:
        """The participants that prepare to join the group."""
        return [one for one in self.participants.values() if one.role is Role.NEWCOMER]

    # Start.

    def start(self, nodes: frozenset[str], slots: Sequence[Slot], replicas: int = 1) -> None:
        """Start a group on these units; `slots` are all slots there, in order of rank."""
        ranks = tuple(slot.name for slot in slots)
        group = GroupMembers(next(self._numbers), nodes, ranks, self._response.now, replicas)
        self._enter(Starting(group))
        self._response.do(do.OpenStore(group.number))
        for rank, slot in enumerate(slots):
            self._run(slot, Place(group.number, rank, len(slots), replicas))
        self._log_start(group)

    def add_newcomer(self, slot: Slot, size: int) -> None:
        """Start a process that prepares to join the group, whose replicas have `size` members then."""
        self._run(slot, None, size)

    def _run(self, slot: Slot, place: Place | None, size: int | None = None) -> None:
        run = next(self._numbers)
        role = Role.NEWCOMER if place is None else Role.MEMBER
        has_state = place is not None
        self.participants[slot.name] = Participant(
            slot.name, slot.node, slot.place, run, role, has_state=has_state, began=self._response.now
        )
        start = StartRun(self._name, run, self._options, b"", place, self._meeting, size)
        self._response.do(do.Send(slot.name, start))

    def report_training(self) -> bool:
        """Record that the group trains; return whether this was not known: it is the first report after the start."""
        phase = self._phase
        if isinstance(phase, Starting):
            self._enter(Running(phase.group))
        elif isinstance(phase, Pausing) and not phase.reported:
            self._enter(Pausing(phase.group, reported=True))
        else:
            return False
        self._planner.measured("start", self._response.now - phase.group.began)
        return True

    def call_off(self) -> None:
        """End a group that has not started to train; no failure is its cause."""
        assert self.group is not None
        self._enter(Pausing(self.group, reported=False))
        self.dismiss(self.members, abort=True)

    # Changes in place.

    def regroup(self, ranks: tuple[str, ...], replicas: int = 1, *, failure: bool) -> None:
        """Command these slots to form the next group, and all other members of the current one to leave."""
        change = self.change
        pauses = isinstance(self._phase, Pausing) or (change is not None and change.pauses)
        arrived = frozenset() if change is None else self.arrived
        answered = change is not None and change.answered
        before = self._close_change()
        self.arrived = frozenset()
        participants = self.participants
        nodes = frozenset(participants[slot].place for slot in ranks)
        after = GroupMembers(next(self._numbers), nodes, ranks, self._response.now, replicas)
        grows = any(not participants[slot].has_state for slot in ranks)
        self._enter(Regrouping(before, after, failure, grows, set(ranks), pauses, answered=answered))
        self._response.do(do.OpenStore(after.number))
        others = [one for slot, one in participants.items() if slot not in ranks]
        leavers = [one for one in others if one.role is Role.MEMBER or (failure and one.slot in before.running)]
        self.dismiss(leavers, abort=failure)
        for rank, slot in enumerate(ranks):
            member = participants[slot]
            member.role, member.group_failed, member.complaint, member.waited = Role.MEMBER, None, "", 0.0
            # Only a member that has responded to the previous command, by a report or by coming to the meeting, gets
            # more time.
            if failure and (member.deadline is None or slot in arrived):
                member.deadline = self._response.now + self._change_timeout
            place = Place(after.number, rank, len(ranks), replicas)
            self._send(member, ChangeGroup(self._name, member.run, after.number, place, abort=failure))

    def grant_time(self) -> None:
        """Extend the deadlines of members that compute after a failure, as in a long validation, while nobody waits."""
        change = self.change
        now = self._response.now
        if change is None or not change.failure or now > change.after.began + self._silence_timeout:
            return
        members = [self.participants[slot] for slot in change.awaited if self.participants[slot].has_state]
        met = any(one.slot in self.arrived or one.group_failed is not None for one in members)
        change.answered = change.answered or change.begun or met
        for one in members if not change.answered else ():
            if one.deadline is not None and not one.waited:
                one.deadline = now + self._change_timeout

    def joined(self, member: Participant, report: Joined) -> None:
        """Record that a member trains in a new group."""
        change = self.change
        if change is None or report.generation != change.after.number:
            return  # of a group in which a member has failed since
        change.begun = True
        member.trains()
        change.awaited.discard(member.slot)
        change.paused = max(change.paused, report.paused)
        change.transferred = max(change.transferred, report.transferred)
        change.moved += report.received
        if not change.awaited:
            self._complete(change)

    def _complete(self, change: Regrouping) -> None:
        """Complete a change: all members train in the new group, and those that leave get a deadline."""
        self._enter(Running(change.after))
        self._response.do(do.CloseStore(change.before.number))
        self._log_change(change)
        for one in self.participants.values():
            if one.role is Role.LEAVER and one.deadline is None:
                one.deadline = self._response.now + self._change_timeout
        if change.pauses:  # commanded before the failure: some members may not have received it
            self.pause()

    def _close_change(self) -> GroupMembers:
        """End a change that is still in progress, if any; return the current group."""
        change, group = self.change, self.group
        assert group is not None
        if change is not None:
            self._enter(Running(group))
            if change.begun:
                self._log_change(change)
                self._response.do(do.CloseStore(change.before.number))
            else:
                self._response.do(do.CloseStore(change.after.number))
        return group

    def change_batch(self, size: int) -> None:
        """Command the first member of a group that trains undisturbed to change the batch size, with all others."""
        if isinstance(self._phase, Running) and (first := self.participants.get(self._phase.group.first)) is not None:
            self._send(first, ChangeBatch(self._name, first.run, size))

    # Departures.

    def pause(self) -> None:
        """Make the members save and end, and dismiss all newcomers."""
        phase = self._phase
        if isinstance(phase, Regrouping) and phase.begun:
            phase.pauses = True
        else:
            if isinstance(phase, Regrouping):
                coming = [self.participants[slot] for slot in phase.after.ranks if slot in self.participants]
                self.dismiss([one for one in coming if not one.has_state], abort=False)
            lost = phase.lost_leavers if isinstance(phase, Regrouping) else []
            self._enter(Pausing(self._close_change(), not isinstance(phase, Starting), lost))
        self.dismiss(self.newcomers, abort=False)
        for member in self.participants.values():
            if member.role is Role.MEMBER:
                self._send(member, PauseRun(self._name, member.run))

    def dismiss(self, leavers: Iterable[Participant], *, abort: bool) -> None:
        """Dismiss newcomers, and members: at the boundary at which the others regroup, or at once with `abort`."""
        change, now = self.change, self._response.now
        for one in list(leavers):
            has_joined = one.role is not Role.NEWCOMER and one.has_state
            if not has_joined:
                self._send(one, PauseRun(self._name, one.run))
            elif abort or one.role is not Role.LEAVER:
                number = change.after.number if change is not None else 0
                self._send(one, ChangeGroup(self._name, one.run, number, None, abort=abort))
            if abort:
                one.deadline = now + self._leave_timeout
            elif not has_joined:
                one.deadline = now + self._change_timeout
            one.role = Role.LEAVER

    def abandon(self) -> None:
        """End the group without saving the state."""
        group = self._close_change()
        self._enter(Abandoning(group))
        self.dismiss(self.participants.values(), abort=True)

    def end(self) -> None:
        """Let no group follow: the training job has finished or failed."""
        self._enter(Ended(None if isinstance(self._phase, Waiting) else self._close_change()))

    def remove(self, participant: Participant) -> bool:
        """Remove a slot whose run has ended; return whether it was still needed by a group."""
        del self.participants[participant.slot]
        missed = False
        for one in (self.group, self.next_group):
            if one is not None and participant.slot in one.running:
                missed = True
                one.running.discard(participant.slot)
        if self.change is not None:
            self.change.awaited.discard(participant.slot)
        return missed

    def missed_leavers(self) -> list[Failure]:
        """Take the failures of members that were to leave, if the others may not have left them behind.

        All that stay are at the meeting of the next group once they have: only then do they not need them any more. If
        they pause instead, they do until they have ended.
        """
        phase = self._phase
        if not isinstance(phase, (Regrouping, Pausing)) or not phase.lost_leavers:
            return []
        running = phase.after.running if isinstance(phase, Regrouping) else phase.group.running
        stay = {slot for slot in running if self.participants[slot].has_state}
        failed = any(self.participants[slot].group_failed is not None for slot in stay)
        left_behind = isinstance(phase, Regrouping) and (phase.begun or (stay <= self.arrived and not failed))
        if not (left_behind or failed or self._response.now - phase.lost_leavers[0][1] > _LEFT_BEHIND):
            return []
        lost, phase.lost_leavers = phase.lost_leavers, []
        return [] if left_behind else [failure for failure, _ in lost]

    def blame(self, slot: str, node: str) -> None:
        """Note that the process in a slot was lost, for the records of the groups that need it."""
        for one in (self.group, self.next_group):
            if one is not None and slot in one.ranks:
                one.lost[slot] = node

    def end_group_if_empty(self) -> None:
        """End the current group once all its processes have ended."""
        group = self.group
        if group is None or group.running:
            return
        failure, over = isinstance(self._phase, Abandoning), isinstance(self._phase, Ended)
        self._close_change()
        self._response.do(do.CloseStore(group.number))
        self._log_end(group, self._response.now, failure=failure)
        self._enter(Ended(None) if over else Waiting(self._response.now))
        self.dismiss(self.newcomers, abort=False)

    # Messages and records.

    def _send(self, participant: Participant, message: ChangeBatch | ChangeGroup | PauseRun) -> None:
        self._response.do(do.Send(participant.slot, message))

    def _log_start(self, group: GroupMembers, change: Regrouping | None = None) -> None:
        entry = record.FragmentStarted(self._name, group.number, sorted(group.nodes), in_place=False, paused=0.0)
        if change is not None:
            entry = replace(entry, in_place=True, paused=change.paused, moved=change.moved, repaired=change.failure)
        self._response.log(entry)

    def _log_end(self, group: GroupMembers, until: float, *, failure: bool) -> None:
        seconds = max(0.0, until - group.began)
        counted = self._counted_seconds()
        nodes, lost = sorted(group.nodes), group.lost if failure else {}
        entry = record.FragmentEnded(self._name, group.number, nodes, failure, seconds, "", counted, lost)
        self._response.log(entry)

    def _log_change(self, change: Regrouping) -> None:
        self._log_end(change.before, change.after.began, failure=change.failure)
        self._log_start(change.after, change)
        if not change.failure and not change.awaited:
            sizes = len(change.before.nodes), len(change.after.nodes)
            self._planner.changed_in_place("up" if change.grows else "down", change.paused, change.transferred, sizes)
