"""The state machine of one training.

A training starts on its nodes as a group of processes, from its newest checkpoint if it has one. From then on, the
group changes in place: newcomers prepare on added nodes while the members train, then one command makes all of them
form the next group. The survivors of a failure receive the same command. Only a training that loses all its nodes, or
cannot change in place, is paused with a checkpoint and started again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidTrainer, TooManyRestarts, TrainingCancelled
from freetrain_parsl.executor.control.training import commands as do
from freetrain_parsl.executor.control.training import events as on
from freetrain_parsl.executor.control.training.cost_estimates import changed_significantly, learned_costs
from freetrain_parsl.executor.control.training.next_change import (
    disconnection,
    fewest_to_exclude,
    hanging_newcomers,
    members_of,
    next_change,
    survivors,
)
from freetrain_parsl.executor.control.training.stall import stall_reason
from freetrain_parsl.executor.control.training.states import (
    TRANSITIONS,
    Abandoning,
    Ended,
    Failure,
    Goal,
    GroupMembers,
    Participant,
    Pausing,
    Recovering,
    Regrouping,
    Role,
    Running,
    Starting,
    Waiting,
)
from freetrain_parsl.planning import events as planner
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import ChangeGroup, PauseRun, Place
from freetrain_parsl.protocol.reports import (
    GroupFailed,
    Joined,
    PauseReason,
    PeersFailed,
    Progress,
    RunFailed,
    RunFinished,
    RunPaused,
    StorageFailed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from freetrain_parsl.executor.control.slot_registry import SlotRegistry
    from freetrain_parsl.executor.control.training.commands import Command
    from freetrain_parsl.executor.control.training.events import Event
    from freetrain_parsl.executor.control.training.states import Phase, State
    from freetrain_parsl.executor.trainings import Limits, TrainingRequest
    from freetrain_parsl.planning.model import RescaleCosts

__all__ = ["TrainingMachine"]

_GATHER = 0.1  # seconds: the slots of a node rarely fail at the same instant


class TrainingMachine:
    """One training from its submission to the end of its last process.

    Parameters
    ----------
    request
        The submitted request.
    limits
        See `Limits`.
    costs
        Rescale costs if the request does not state them, until they are measured.
    numbers
        Yields numbers that are unique within the driver.
    """

    def __init__(
        self, request: TrainingRequest, limits: Limits, costs: RescaleCosts, numbers: Iterator[int], now: float
    ) -> None:
        self.request = request
        self.name = request.name
        self.participants: dict[str, Participant] = {}
        self.goal = Goal.TRAIN
        self.desired: frozenset[str] = frozenset()
        self.progress: Progress | None = None
        self._limits = limits
        self._numbers = numbers
        self._phase: Phase = Waiting(now)
        self._recovering: Recovering | None = None
        self._trainer = request.trainer(costs, submitted=now)
        self._costs = self._trainer.costs
        self._first_step: int | None = None  # at the start of this execution; -1 without a checkpoint
        self._furthest = 0
        self._restarts = 0  # crashes since `_furthest` was reached
        self._last_crash = ""
        self._storage_problem = ""
        self._code_note = ""
        self._stall = ""
        self._arrived: frozenset[str] = frozenset()  # at the meeting of the next group
        self._now = now
        self._registry: SlotRegistry
        self._commands: list[Command] = []

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        before, self._phase = type(self._phase), phase
        assert type(phase) in TRANSITIONS[before] or type(phase) is before, f"{before.__name__} to {phase}"

    @property
    def state(self) -> State:
        """The current state."""
        if self._recovering is None:
            return self.phase
        return Recovering(self.phase, self._recovering.failures, self._recovering.latest)

    @property
    def over(self) -> bool:
        """Whether it has finished or failed."""
        return isinstance(self.phase, Ended)

    @property
    def group(self) -> GroupMembers | None:
        """The current group."""
        return None if isinstance(self.phase, Waiting) else self.phase.group

    @property
    def next_group(self) -> GroupMembers | None:
        """The group that is being formed."""
        return self.phase.after if isinstance(self.phase, Regrouping) else None

    def submit(self) -> list[Command]:
        """Return the commands for a new training."""
        trainer = self._trainer
        self._do(do.Inform(planner.TrainerSubmitted(self._now, trainer)))
        samples = self.request.samples
        self._log(record.TrainingSubmitted(self.name, trainer.min_nodes, trainer.max_nodes, samples))
        return self._take_commands()

    def handle(self, event: Event, registry: SlotRegistry, now: float) -> list[Command]:  # noqa: C901 - a case for each event
        """Handle an event, and return the resulting commands.

        Parameters
        ----------
        event
            The event.
        registry
            The connected slots; only read.
        now
            Seconds.
        """
        self._registry, self._now = registry, now
        match event:
            case on.TimePassed():
                self._arrived = event.arrived
                self._tick(event.arrived)
            case on.Reported():
                self._reported(event)
            case on.RunOver():
                self._run_over(event)
            case on.SlotLost():
                self._slot_lost(event)
            case on.Heartbeat():
                if (member := self.participants.get(event.slot)) is not None:
                    member.waited = event.waited
            case on.Assigned():
                if self.goal is Goal.TRAIN and not self.over:
                    self.desired = event.nodes
            case on.Cancelled():
                self._cancel()
            case on.Failed():
                self._fail(event.error)
            case on.MachineSized():
                self._refuse_if_too_large(event.nodes)
            case on.StoragePostponed():
                self._wait_for_storage(event.condition, event.until)
            case on.StorageBack():
                self._try_again()
        return self._take_commands()

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, arrived: frozenset[str]) -> None:
        if not self.over:
            self._advance(arrived)
            self._explain_stall()
        for one in self.participants.values():
            if one.deadline is not None and self._now > one.deadline:
                self._do(do.Kill(one.slot, "it did not respond to a failure, or did not exit, in time"))

    def _advance(self, arrived: frozenset[str]) -> None:
        group, phase = self.group, self.phase
        if self._recovering is not None:
            if group is None or not group.running or self._now - self._recovering.latest >= _GATHER:
                self._recover(with_newcomers=True)
        elif isinstance(phase, Waiting):
            self._start_or_end()
        elif isinstance(phase, Abandoning):
            return
        elif (cut := self._disconnection()) is not None:
            self._note_failure(Failure(cut, crash=True))
            self._recover(with_newcomers=False)  # they may be the cause
        elif isinstance(phase, Regrouping):
            limit = self._limits.peer_timeout
            if not phase.begun and self._now - phase.after.began > limit:
                for slot in hanging_newcomers(self.participants, phase, arrived):
                    self._do(do.Kill(slot, f"it hangs: it did not join the group within {limit:g} s"))
        elif not any(member.group_failed is not None for member in self._members()):
            self._approach_desired_nodes()

    def _approach_desired_nodes(self) -> None:
        phase = self.phase
        if isinstance(phase, Pausing):
            self._dismiss(self._newcomers(), abort=False)
            return
        assert isinstance(phase, (Starting, Running))
        if isinstance(phase, Running) and self._in_place:
            change = next_change(
                self.participants,
                phase.group,
                self.desired,
                self._registry,
                min_nodes=self.request.min_nodes,
                now=self._now,
            )
            self._dismiss([self.participants[slot] for slot in change.dismiss], abort=False)
            for slot in change.start:
                self._run(slot.name, slot.node, None)
            if change.pause:
                self._pause()
            elif change.ranks:
                self._regroup(change.ranks, failure=False)
            return
        wanted = self.desired - {slot.node for slot in self._registry.slots.values() if slot.leaving}
        self._dismiss(self._newcomers(), abort=False)
        leaves = any(member.node not in wanted for member in self._members())
        if leaves or (isinstance(phase, Running) and wanted != phase.group.nodes):
            self._pause()

    def _disconnection(self) -> str | None:
        return disconnection(
            self.participants,
            self._change,
            self._registry,
            peer_timeout=self._limits.peer_timeout,
            meeting_timeout=self._limits.meeting_timeout,
            now=self._now,
        )

    def _explain_stall(self) -> None:
        reason = ""
        if not self._storage_problem:
            reason = stall_reason(
                self.phase, self.participants, desired=self.desired, needed=self.request.min_nodes, now=self._now
            )
        if reason != self._stall:
            self._stall = reason
            self._log(record.TrainingStalled(self.name, reason))

    # ── groups ────────────────────────────────────────────────────────────────────────────────────

    def _start_or_end(self) -> None:
        if self.goal is not Goal.CANCEL:
            self._start()
        elif not self.participants:
            self.phase = Ended(None)
            self._do(do.Fail(TrainingCancelled(f"training {self.name!r} was cancelled")))

    def _start(self) -> None:
        """Start a new group if all slots of its nodes are connected and idle."""
        slots = self._registry.complete_slots(self.desired)
        if not slots or any(slot.busy is not None or slot.leaving for slot in slots):
            return
        group = GroupMembers(next(self._numbers), self.desired, tuple(slot.name for slot in slots), self._now)
        self.phase = Starting(group)
        self._do(do.OpenStore(group.number))
        for rank, slot in enumerate(slots):
            self._run(slot.name, slot.node, Place(group.number, rank, len(slots)))
        self._log_start(group, in_place=False)

    def _run(self, slot: str, node: str, place: Place | None) -> None:
        run = next(self._numbers)
        role = Role.NEWCOMER if place is None else Role.MEMBER
        self.participants[slot] = Participant(slot, node, run, role, has_state=place is not None, began=self._now)
        self._do(do.Start(slot, run, place))

    def _regroup(self, ranks: tuple[str, ...], *, failure: bool) -> None:
        """Command these slots to form the next group, and all other members of the current one to leave."""
        pauses = isinstance(self.phase, Pausing) or (isinstance(self.phase, Regrouping) and self.phase.pauses)
        arrived = self._arrived if isinstance(self.phase, Regrouping) else frozenset()
        before = self._close_change()
        self._arrived = frozenset()
        participants = self.participants
        nodes = frozenset(participants[slot].node for slot in ranks)
        after = GroupMembers(next(self._numbers), nodes, ranks, self._now)
        grows = any(not participants[slot].has_state for slot in ranks)
        self.phase = Regrouping(before, after, failure, grows, set(ranks), pauses)
        self._do(do.OpenStore(after.number))
        others = [one for slot, one in participants.items() if slot not in ranks]
        leavers = [one for one in others if one.role is Role.MEMBER or (failure and one.slot in before.running)]
        self._dismiss(leavers, abort=failure)
        for rank, slot in enumerate(ranks):
            member = participants[slot]
            member.role, member.group_failed, member.complaint, member.waited = Role.MEMBER, None, "", 0.0
            # Only a member that has responded to the previous command, by a report or by coming to the meeting, gets
            # more time.
            if failure and (member.deadline is None or slot in arrived):
                member.deadline = self._now + self._limits.peer_timeout + self._limits.meeting_timeout
            place = Place(after.number, rank, len(ranks))
            self._send(member, ChangeGroup(self.name, member.run, after.number, place, abort=failure))

    def _joined(self, member: Participant, report: Joined) -> None:
        change = self._change
        if change is None or report.generation != change.after.number:
            return  # of a group in which a member has failed since
        change.begun = True
        member.trains()
        change.awaited.discard(member.slot)
        change.paused = max(change.paused, report.paused)
        if not change.awaited:
            self._complete(change)

    def _complete(self, change: Regrouping) -> None:
        """Complete a change: all members train in the new group, and those that leave get a deadline."""
        self.phase = Running(change.after)
        self._do(do.CloseStore(change.before.number))
        self._log_change(change)
        for one in self.participants.values():
            if one.role is Role.LEAVER and one.deadline is None:
                one.deadline = self._now + self._limits.peer_timeout + self._limits.meeting_timeout
        if change.pauses:  # commanded before the failure: some members may not have received it
            self._pause()

    def _close_change(self) -> GroupMembers:
        """End a change that is still in progress, if any; return the current group."""
        change, group = self._change, self.group
        assert group is not None
        if change is not None:
            self.phase = Running(group)
            if change.begun:
                self._log_change(change)
                self._do(do.CloseStore(change.before.number))
            else:
                self._do(do.CloseStore(change.after.number))
        return group

    def _pause(self) -> None:
        """Make the members save and end, and dismiss all newcomers."""
        phase = self.phase
        if isinstance(phase, Regrouping) and phase.begun:
            phase.pauses = True
        else:
            if isinstance(phase, Regrouping):
                coming = [self.participants[slot] for slot in phase.after.ranks if slot in self.participants]
                self._dismiss([one for one in coming if not one.has_state], abort=False)
            reported = not isinstance(phase, Starting)
            self.phase = Pausing(self._close_change(), reported)
        self._dismiss(self._newcomers(), abort=False)
        for member in self.participants.values():
            if member.role is Role.MEMBER:
                self._send(member, PauseRun(self.name, member.run))

    def _dismiss(self, leavers: Iterable[Participant], *, abort: bool) -> None:
        """Dismiss newcomers, and members: at the boundary at which the others regroup, or at once with `abort`."""
        change = self._change
        for one in list(leavers):
            has_joined = one.role is not Role.NEWCOMER and one.has_state
            if not has_joined:
                self._send(one, PauseRun(self.name, one.run))
            elif abort or one.role is not Role.LEAVER:
                number = change.after.number if change is not None else 0
                self._send(one, ChangeGroup(self.name, one.run, number, None, abort=abort))
            if abort:
                one.deadline = self._now + self._limits.peer_timeout
            elif not has_joined:
                one.deadline = self._now + self._limits.peer_timeout + self._limits.meeting_timeout
            one.role = Role.LEAVER

    # ── failures ──────────────────────────────────────────────────────────────────────────────────

    def _group_failed(self, member: Participant, report: GroupFailed) -> None:
        self._exclude_unreachable(report)
        change = self._change
        if self.over or member.role is Role.LEAVER:
            self._dismiss([member], abort=True)
        elif change is None or not change.failure or report.generation >= change.after.number:
            member.deadline = None
            member.group_failed, member.complaint = self._now, report.reason  # else its command is in transit

    def _exclude_unreachable(self, report: GroupFailed | PeersFailed) -> None:
        """Exclude the members that the others cannot reach, after a group could not be formed."""
        groups = [group for group in (self.next_group, self.group) if group is not None]
        ranks = next((group.ranks for group in groups if group.number == report.generation), ())
        for slot in fewest_to_exclude(ranks, report.unreachable):
            member = self.participants.get(slot)
            if member is None or slot not in self._registry.slots or member.unreachable or self.over:
                continue
            member.unreachable = True
            reason = f"other nodes of training {self.name} cannot reach it, though it reaches the driver"
            self._do(do.SetAside(slot, reason))
            self._note_failure(Failure(f"{member.node}: {reason}", crash=False))

    def _slot_lost(self, event: on.SlotLost) -> None:
        participant = self.participants.get(event.slot)
        if participant is None:
            return
        missed = self._remove(participant)
        if missed and self.over:
            self._dismiss(self.participants.values(), abort=True)
        elif missed:
            self._note_failure(Failure(event.reason, event.crash))
        self._end_group_if_empty()

    def _note_failure(self, failure: Failure) -> None:
        before = [] if self._recovering is None else self._recovering.failures
        self._recovering = Recovering(self.phase, [*before, failure], self._now)

    def _recover(self, *, with_newcomers: bool) -> None:
        """Continue with the survivors, or, if none of them has the state, from the newest checkpoint."""
        assert self._recovering is not None
        failures, self._recovering = self._recovering.failures, None
        failure = next((one for one in failures if one.crash), failures[-1])
        if failure.crash:
            self._restarts += 1
            self._last_crash = failure.reason
        group, phase = self.group, self.phase
        if group is None:
            return
        if self._restarts > self._limits.max_restarts:
            self._fail(
                TooManyRestarts(
                    f"training {self.name!r}: {self._restarts} crashes without a step beyond step {self._furthest}, "
                    f"though its nodes were not taken; the last: {self._last_crash}; see the worker logs in the run "
                    "directory"
                )
            )
            return
        if not isinstance(phase, Abandoning):
            reported = not isinstance(phase, Starting) and not (isinstance(phase, Pausing) and not phase.reported)
            ranks: tuple[str, ...] = ()
            if self._in_place and reported:
                ranks = survivors(self.participants, group, self._change, with_newcomers=with_newcomers)
            if ranks:
                self._regroup(ranks, failure=True)
                return
            self._do(do.CountRestart())
            self._abandon()
        self._end_group_if_empty()

    def _abandon(self) -> None:
        """End the group without saving the state."""
        group = self._close_change()
        self.phase = Abandoning(group)
        self._dismiss(self.participants.values(), abort=True)

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def _reported(self, event: on.Reported) -> None:
        participant = self.participants.get(event.slot)
        if participant is None or participant.run != event.run:
            return  # from an earlier run
        match event.report:
            case Progress():
                if not self.over:
                    if self.goal is not Goal.HOLD:  # else it was sent before the directory failed
                        self._do(do.ForgetStorage())
                    self._take_progress(event.report)
            case GroupFailed():
                self._group_failed(participant, event.report)
            case Joined():
                self._joined(participant, event.report)
            case _:  # Ready
                participant.ready = self._now

    def _take_progress(self, progress: Progress) -> None:
        phase = self.phase
        if isinstance(phase, Starting) or (isinstance(phase, Pausing) and not phase.reported):
            self.phase = Running(phase.group) if isinstance(phase, Starting) else Pausing(phase.group, reported=True)
            self._learn("start", self._now - phase.group.began)
            if progress.resumed_from is not None:
                self._log(record.FragmentResumed(self.name, progress.resumed_from))
        if progress.code_note and progress.code_note != self._code_note:
            self._code_note = progress.code_note
            self._log(record.CodeChanged(self.name, progress.code_note))
        if progress.storage_problem != self._storage_problem:
            self._storage_problem = condition = progress.storage_problem
            self._log(record.SavingFails(self.name, condition) if condition else record.SavingWorks(self.name))
        if self._first_step is None:
            self._first_step = -1 if progress.resumed_from is None else progress.resumed_from
        if progress.step > self._furthest:
            self._furthest, self._restarts = progress.step, 0
        before, self.progress = self.progress, progress
        known = None if before is None else before.checkpoint_step
        if progress.checkpoint_step is not None and progress.checkpoint_step != known:
            self._log(record.Checkpoint(self.name, progress.checkpoint_step))
        self._do(do.KeepProgress(progress))
        total = progress.samples_total or self.request.samples
        if total is not None:
            left = max(0.0, float(total) - progress.samples)
            self._trainer = replace(self._trainer, work_left=left)
            self._do(do.Inform(planner.TrainerProgressed(self._now, self.name, left)))

    def _run_over(self, event: on.RunOver) -> None:
        participant = self.participants.get(event.slot)
        if participant is None or participant.run != event.run:
            return
        self._do(do.Release(event.slot))
        group, end = self.group, event.end
        first = group is not None and event.slot == group.first
        if first and isinstance(end, (RunFinished, RunPaused)) and not self.over:
            self._take_progress(end.progress)
        if isinstance(end, PeersFailed):
            self._exclude_unreachable(end)
        missed = self._remove(participant)
        match end:
            case StorageFailed():
                self._hold(end.condition)
            case RunFailed():
                self._fail(event.payload)
            case RunFinished():
                if first:
                    self._finish(event.payload)
            case PeersFailed() | RunPaused(reason=PauseReason.LEFT):
                reason = end.reason if isinstance(end, PeersFailed) else end.reason.sentence
                if missed and participant.role is Role.MEMBER and not self.over:
                    self._note_failure(Failure(reason, crash=False))
            case RunPaused():
                # A node is about to close, or the slot was commanded to end: all members pause.
                if missed and not self.over and not isinstance(self.phase, (Waiting, Pausing)):
                    self._pause()
        self._end_group_if_empty()

    # ── the ends ──────────────────────────────────────────────────────────────────────────────────

    def _remove(self, participant: Participant) -> bool:
        """Remove a slot whose run has ended; return whether it was still needed by a group."""
        del self.participants[participant.slot]
        group, coming = self.group, self.next_group
        missed = any(one is not None and participant.slot in one.running for one in (group, coming))
        for one in (group, coming):
            if one is not None:
                one.running.discard(participant.slot)
        if (change := self._change) is not None:
            change.awaited.discard(participant.slot)
        return missed

    def _end_group_if_empty(self) -> None:
        group = self.group
        if group is None or group.running or self._recovering is not None:
            return
        failure = isinstance(self.phase, Abandoning)
        self._close_change()
        self._do(do.CloseStore(group.number))
        self._log_end(group, self._now, failure=failure)
        self.phase = Ended(None) if self.over else Waiting(self._now)
        self._dismiss(self._newcomers(), abort=False)

    def _finish(self, payload: bytes) -> None:
        self._end()
        self._do(do.Inform(planner.TrainerFinished(self._now, self.name)))
        trained = self._first_step is None or self._furthest > self._first_step
        self._log(record.TrainingFinished(self.name, trained, self._furthest))
        self._do(do.Resolve(payload))
        self._dismiss([one for one in self.participants.values() if not one.has_state], abort=False)

    def _fail(self, error: BaseException | bytes) -> None:
        if self.over:
            return
        self._do(do.Inform(planner.TrainerFailed(self._now, self.name)))
        self._do(do.Fail(error))
        self._end()
        self._dismiss(self.participants.values(), abort=True)
        self._end_group_if_empty()  # all its members may have failed

    def _end(self) -> None:
        self._recovering = None
        self.phase = Ended(None if isinstance(self.phase, Waiting) else self._close_change())

    def _cancel(self) -> None:
        if self.over or self.goal is Goal.CANCEL:
            return
        self.goal, self.desired = Goal.CANCEL, frozenset()
        self._do(do.Inform(planner.TrainerFailed(self._now, self.name)))
        self._log(record.TrainingCancelled(self.name))

    def _refuse_if_too_large(self, nodes: int) -> None:
        needed = self.request.min_nodes
        if self.over or self.group is not None or needed <= nodes:
            return
        self._fail(
            InvalidTrainer(
                f"training {self.name!r} needs min_nodes={needed} nodes at the same time, but there are only {nodes} "
                "for its blocks: lower min_nodes, or use a larger partition"
            )
        )

    # ── the checkpoint directory ──────────────────────────────────────────────────────────────────

    def _hold(self, condition: str) -> None:
        """Take the training off its nodes: it cannot start or continue without the checkpoint directory."""
        if self.over or self.goal is not Goal.TRAIN:
            return
        self.goal, self.desired = Goal.HOLD, frozenset()
        self._do(do.Inform(planner.TrainerWithheld(self._now, self.name)))
        self._do(do.AwaitStorage(condition))
        self._recovering = None
        if self.group is not None:
            self._abandon()
        else:
            self._dismiss(self.participants.values(), abort=True)

    def _wait_for_storage(self, condition: str, until: float) -> None:
        if self.goal is Goal.HOLD and not self.over:
            self._storage_problem = condition
            self._log(record.TrainingWaits(self.name, condition, until))

    def _try_again(self) -> None:
        if self.goal is Goal.HOLD and not self.over:
            self.goal, self._storage_problem = Goal.TRAIN, ""
            self._log(record.TrainingTriesAgain(self.name))
            self._do(do.Inform(planner.TrainerSubmitted(self._now, self._trainer)))

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _change(self) -> Regrouping | None:
        return self.phase if isinstance(self.phase, Regrouping) else None

    @property
    def _in_place(self) -> bool:
        return self.progress is None or self.progress.in_place

    def _members(self) -> list[Participant]:
        return [] if self.group is None else members_of(self.participants, self.group)

    def _newcomers(self) -> list[Participant]:
        return [one for one in self.participants.values() if one.role is Role.NEWCOMER]

    def _learn(self, kind: str, seconds: float) -> None:
        """Update the rescale costs, unless the user stated them; inform the planner of a significant change."""
        if self.request.costs is not None:
            return
        self._costs = learned_costs(self._costs, kind, seconds)
        if changed_significantly(self._trainer.costs, self._costs):
            self._trainer = replace(self._trainer, costs=self._costs)
            self._do(do.Inform(planner.TrainerLearned(self._now, self._trainer)))

    def _log_start(self, group: GroupMembers, *, in_place: bool, paused: float = 0.0) -> None:
        self._log(record.FragmentStarted(self.name, group.number, sorted(group.nodes), in_place, paused))

    def _log_end(self, group: GroupMembers, until: float, *, failure: bool) -> None:
        seconds = max(0.0, until - group.began)
        self._log(record.FragmentEnded(self.name, group.number, sorted(group.nodes), failure, seconds))

    def _log_change(self, change: Regrouping) -> None:
        self._log_end(change.before, change.after.began, failure=change.failure)
        self._log_start(change.after, in_place=True, paused=change.paused)
        if not change.failure and not change.awaited:
            self._learn("up" if change.grows else "down", change.paused)

    def _log(self, entry: record.Record) -> None:
        self._do(do.Log(entry))

    def _send(self, participant: Participant, message: ChangeGroup | PauseRun) -> None:
        self._do(do.Send(participant.slot, message))

    def _do(self, command: Command) -> None:
        self._commands.append(command)

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands
