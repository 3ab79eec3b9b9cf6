"""The state machine of one training job.

A training job starts on its nodes as a group of processes, from its newest checkpoint if it has one. From then on, the
group changes in place: newcomers prepare on added nodes while the members train, then one command makes all of them
form the next group. The survivors of a failure receive the same command. Only a training job that loses all its nodes,
or cannot change in place, is paused with a checkpoint and started again.

The machine decides. `TrainingProcesses` makes the changes of the group and its phase, `Recovery` chooses who continues
after failures, `ProgressTracker` follows the training job's progress, and `PlannerView` reports it to the planner.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidApp, TrainingCancelled
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.executor.jobs import events as on
from freetrain_parsl.executor.jobs.commands import Response
from freetrain_parsl.executor.jobs.training.group import TrainingProcesses
from freetrain_parsl.executor.jobs.training.progress import PlannerView, ProgressTracker, stall_reason
from freetrain_parsl.executor.jobs.training.rank_order import (
    divided,
    fitting,
    in_order_of_place,
    least_moved,
)
from freetrain_parsl.executor.jobs.training.recovery import Recovery
from freetrain_parsl.executor.jobs.training.states import (
    Abandoning,
    Ended,
    Failure,
    Goal,
    Pausing,
    Recovering,
    Regrouping,
    Role,
    Running,
    Starting,
    Waiting,
    disconnection,
    hanging_newcomers,
    next_change,
    stuck_members,
)
from freetrain_parsl.planning.sizes import ANY_COUNT
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import RunEnded, RunReport
from freetrain_parsl.protocol.reports import (
    GroupFailed,
    Joined,
    Noted,
    PauseReason,
    PeersFailed,
    Progress,
    RunFailed,
    RunFinished,
    RunPaused,
    StorageFailed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.jobs.commands import Addressed, Command
    from freetrain_parsl.executor.jobs.events import Event
    from freetrain_parsl.executor.jobs.request import Limits, TrainingRequest
    from freetrain_parsl.executor.jobs.training.states import GroupMembers, Participant, Phase, State
    from freetrain_parsl.planning.model import CostsInSeconds
    from freetrain_parsl.planning.sizes import AllowedCounts
    from freetrain_parsl.protocol.reports import CountRefused, Report

__all__ = ["TrainingMachine"]

_MOST_FAILING_NODES = 3  # then the function's exception is not a node's fault


class TrainingMachine:
    """One training job from its submission to the end of its last process.

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
    units_per_node
        Number of the units of a node that it is assigned: of its slots where jobs share nodes, or 1.
    sharded_on
        The numbers of units that its model allows, as an earlier training job that is alike has learned.
    """

    states_curve = False

    def __init__(
        self,
        request: TrainingRequest,
        limits: Limits,
        costs: CostsInSeconds,
        numbers: Iterator[int],
        now: float,
        *,
        units_per_node: int = 1,
        sharded_on: AllowedCounts | None = None,
    ) -> None:
        self.request = request
        self.name = request.name
        self.goal = Goal.TRAIN
        self.desired: frozenset[str] = frozenset()
        self._assigned = now
        self._limits = limits
        self._units_per_node = units_per_node
        self._response = Response(now)
        self._planner = PlannerView(request, costs, self._response, sharded_on or ANY_COUNT)
        self._tracker = ProgressTracker(request.name, limits.max_restarts, self._response)
        self._processes = TrainingProcesses(
            request, limits, numbers, self._response, self._planner, lambda: self._tracker.counted_seconds
        )
        self._recovery = Recovery(request, self._processes, self._tracker, self._response)
        self._stall = ""
        self._failing_nodes: set[str] = set()  # on which the function raised an exception before it joined the group
        self._registry: SlotRegistry

    @property
    def participants(self) -> Mapping[str, Participant]:
        """Slot -> participant."""
        return self._processes.participants

    @property
    def progress(self) -> Progress | None:
        """The latest report of progress."""
        return self._tracker.latest

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._processes.phase

    @property
    def state(self) -> State:
        """The current state."""
        pending = self._recovery.pending
        return self.phase if pending is None else Recovering(self.phase, pending.failures, pending.latest)

    @property
    def over(self) -> bool:
        """Whether it has finished or failed."""
        return isinstance(self.phase, Ended)

    @property
    def waits_for_nodes(self) -> bool:
        """Whether it has neither processes nor nodes on which to start them, so that only an event can change it."""
        waits = isinstance(self.phase, Waiting) and not self.participants and self._recovery.pending is None
        return waits and not self.desired and self.goal is Goal.TRAIN

    @property
    def settled(self) -> bool:
        """Whether it trains undisturbed on the nodes that it is assigned, so that only events can soon change it."""
        phase = self.phase
        if not isinstance(phase, Running) or self._recovery.pending is not None or self.goal is not Goal.TRAIN:
            return False
        return (
            self.desired == phase.group.nodes
            and not self._stall
            and all(
                one.role is Role.MEMBER and one.group_failed is None and one.deadline is None
                for one in self.participants.values()
            )
        )

    @property
    def ended(self) -> bool:
        """Whether it is over, and all its processes have ended."""
        return self.over and not self.participants

    @property
    def idle(self) -> bool:
        """Whether it neither runs nor has nodes assigned."""
        return not (self.participants or self.desired)

    @property
    def forming(self) -> int | None:
        """Number of the group that is being formed."""
        group = self._processes.next_group
        return None if group is None else group.number

    def run_in(self, slot: str) -> int | None:
        """Return the number of its run in a slot."""
        participant = self.participants.get(slot)
        return None if participant is None else participant.run

    def submit(self) -> list[Addressed]:
        """Return the commands for a new training job."""
        self._planner.submit()
        return self._commands()

    def _commands(self) -> list[Addressed]:
        return [(self.name, command) for command in self._response.take()]

    def handle(self, event: Event, registry: SlotRegistry, now: float) -> list[Addressed]:  # noqa: C901 - a case for each event
        """Handle an event, and return the resulting commands; see `HeldJob`."""
        self._registry, self._response.now = registry, now
        match event:
            case on.TimePassed():
                self._processes.arrived = event.arrived
                self._tick(event.arrived)
            case on.Said(slot, RunReport(run=run, report=report)) if self.run_in(slot) == run:
                self._reported(self.participants[slot], report)
            case on.Said(slot, RunEnded() as message) if self.run_in(slot) == message.run:
                self._run_over(self.participants[slot], message)
            case on.SlotLost():
                self._slot_lost(event)
            case on.Heartbeat():
                if (member := self.participants.get(event.slot)) is not None:
                    member.waited = event.waited
            case on.Assigned():
                if self.goal is Goal.TRAIN and not self.over:
                    self._assigned = self._assigned if self.desired else now
                    self.desired = event.nodes
            case on.BatchChosen():
                if self._recovery.pending is None and self.goal is Goal.TRAIN:
                    self._processes.change_batch(event.size)
            case on.Cancelled():
                self._cancel()
            case on.Failed():
                self._fail(unshared(event.error))
            case on.MachineSized():
                self._refuse_if_too_large(event)
            case on.StoragePostponed():
                self._wait_for_storage(event.condition, event.until)
            case on.StorageBack():
                self._try_again()
        return self._commands()

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, arrived: frozenset[str]) -> None:
        if not self.over:
            self._processes.grant_time()
            self._advance(arrived)
            self._explain_stall()
        for one in self.participants.values():
            if one.deadline is not None and self._response.now > one.deadline:
                self._do(do.Kill(one.slot, "it did not respond to a failure, or did not exit, in time"))

    def _advance(self, arrived: frozenset[str]) -> None:
        phase = self.phase
        if self._recovery.pending is not None:
            if self._recovery.is_due:
                self._recover(with_newcomers=True)
        elif isinstance(phase, Waiting):
            self._start_or_end()
        elif isinstance(phase, Abandoning):
            return
        elif (cut := self._disconnection()) is not None:
            self._recovery.note(Failure(cut, crash=True))
            self._recover(with_newcomers=False)  # they may be the cause
        elif missed := self._processes.missed_leavers():
            for failure in missed:
                self._recovery.note(failure)
        elif isinstance(phase, Regrouping):
            self._watch(phase, arrived)
        elif not any(member.group_failed is not None for member in self._processes.members):
            self._approach_desired_nodes()

    def _watch(self, change: Regrouping, arrived: frozenset[str]) -> None:
        """End the processes that hang in a change."""
        limit = self._limits.peer_timeout
        if not change.begun and self._response.now - change.after.began > limit:
            for slot in hanging_newcomers(self.participants, change, arrived):
                self._do(do.Kill(slot, f"it hangs: it did not join the group within {limit:g} s"))
        for slot in stuck_members(self.participants, change, arrived, self._response.now):
            self._do(do.Kill(slot, "it waits for a member that has failed, although its connections were closed"))

    def _approach_desired_nodes(self) -> None:
        phase = self.phase
        if isinstance(phase, Pausing):
            self._processes.dismiss(self._processes.newcomers, abort=False)
            return
        assert isinstance(phase, (Starting, Running))
        if isinstance(phase, Running) and self._tracker.in_place:
            change = next_change(
                self.participants,
                phase.group,
                self.desired,
                self._registry,
                least=self.request.min_nodes,
                allowed=ANY_COUNT if self.request.options.replicas > 1 else self._tracker.allowed_counts,
                now=self._response.now,
            )
            self._processes.dismiss([self.participants[slot] for slot in change.dismiss], abort=False)
            if change.start:
                slots = self._registry.complete_slots(self.desired) or self.desired
                expected = len(slots) // self.request.counts.replicas_in(len(self.desired))
                for slot in change.start:
                    self._processes.add_newcomer(slot, expected)
            if change.pause:
                self._processes.pause()
            elif change.ranks and self.request.options.replicas > 1:
                self._regroup_replicas(phase.group, change.ranks)
            elif change.ranks:
                ranks = change.ranks
                if self._tracker.is_sharded:
                    ranks = least_moved(phase.group.ranks, ranks)
                self._processes.regroup(ranks, failure=False)
            return
        wanted = self.desired - self._registry.closing(self.desired)
        self._processes.dismiss(self._processes.newcomers, abort=False)
        leaves = any(member.place not in wanted for member in self._processes.members)
        if leaves or (isinstance(phase, Running) and wanted != phase.group.nodes):
            self._processes.pause()

    def _regroup_replicas(self, group: GroupMembers, ranks: tuple[str, ...]) -> None:
        """Continue with those of these slots that form replicas, unless they are the present members."""
        slots = self._registry.slots
        ranks = fitting(group, ranks, lambda slot: slots[slot].place, self._planner.allowed_counts)
        if not ranks:
            self._processes.pause()
        elif set(ranks) != set(group.ranks):
            by_place = in_order_of_place([slots[slot] for slot in ranks], self._registry, self._response.now)
            replicas = self._replicas_on(by_place)
            self._processes.regroup(
                divided(group, ranks, replicas, [slot.name for slot in by_place]), replicas, failure=False
            )

    def _replicas_on(self, slots: Sequence[Slot]) -> int:
        """Return the number of replicas on units with these slots: each has whole units, and equally many slots."""
        units = Counter(slot.place for slot in slots)
        return self.request.counts.replicas_in(len(units)) if len(set(units.values())) == 1 else 1

    def _disconnection(self) -> str | None:
        return disconnection(
            self.participants,
            self._processes.change,
            self._registry,
            peer_timeout=self._limits.peer_timeout,
            meeting_timeout=self._limits.meeting_timeout,
            now=self._response.now,
        )

    def _explain_stall(self) -> None:
        reason = ""
        if not self._tracker.storage_problem:
            reason = stall_reason(
                self.phase,
                self.participants,
                steps=self._tracker.steps,
                desired=self.desired,
                assigned=self._assigned,
                needed=self.request.min_nodes,
                shared=self._units_per_node > 1,
                now=self._response.now,
            )
        self._note_stall(reason)

    def _note_stall(self, reason: str) -> None:
        if reason != self._stall:
            self._stall = reason
            self._log(record.TrainingStalled(self.name, reason))

    def _start_or_end(self) -> None:
        if self.goal is not Goal.CANCEL:
            self._start()
        elif not self.participants:
            self._processes.end()
            self._do(do.Fail(TrainingCancelled(f"training job {self.name!r} was cancelled")))

    def _start(self) -> None:
        """Start a new group if all slots of its nodes are connected and idle."""
        slots = self._registry.complete_slots(self.desired)
        if slots and not any(slot.busy is not None or slot.leaving for slot in slots):
            if (replicas := self._replicas_on(slots)) > 1:
                slots = in_order_of_place(slots, self._registry, self._response.now)
            self._processes.start(self.desired, slots, replicas)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────

    def _group_failed(self, member: Participant, report: GroupFailed) -> None:
        self._recovery.exclude_unreachable(report, self._registry)
        change = self._processes.change
        if self.over or member.role is Role.LEAVER:
            self._processes.dismiss([member], abort=True)
        elif change is None or not change.failure or report.generation >= change.after.number:
            member.deadline = None
            member.group_failed, member.complaint = self._response.now, report.reason  # else its command is in transit

    def _raised(self, participant: Participant, end: RunFailed, payload: bytes, *, missed: bool) -> None:
        """Fail, unless the function has raised its exception in a newcomer: this may be the node's fault."""
        if self.over or (end.refused is not None and self._count_refused(participant, end.refused)):
            return
        if not participant.has_state:
            self._failing_nodes.add(participant.node)
        if participant.has_state or len(self._failing_nodes) >= _MOST_FAILING_NODES:
            self._fail(payload)
            return
        reason = f"training job {self.name} could not join its group there: {end.reason}"
        self._do(do.SetAside(participant.slot, reason))
        if missed and participant.role is Role.MEMBER:
            self._processes.blame(participant.slot, participant.node)
            self._recovery.note(Failure(f"{participant.node}: {reason}", crash=False))

    def _count_refused(self, participant: Participant, refused: CountRefused) -> bool:
        """Learn which numbers of processes the model allows; return whether this is not a failure of the function.

        Then it starts, or grows, on another number: as each refusal leaves fewer, this ends.
        """
        group, phase = self._processes.group, self.phase
        if group is None:
            return True  # a newcomer that was dismissed when its group ended
        try:
            learned = self._planner.refuse(refused.allowed, len(group.ranks) // len(group.nodes))
        except InvalidApp as error:
            self._fail(InvalidApp(f"{error}; on {refused.size} processes it failed: {refused.reason}"))
            return True
        if learned:
            rule = self._planner.allowed_counts
            self._tracker.note(
                f"it cannot run on {refused.size} processes: {refused.reason}; it gets numbers of nodes that are {rule}"
            )
        elif participant.role is Role.MEMBER:
            return False
        starts = isinstance(phase, Starting) or (isinstance(phase, Pausing) and not phase.reported)
        if participant.role is Role.MEMBER and starts:
            self._recovery.pending = None  # the others lose it, which is no failure either
            self._processes.call_off()
        # The planner is about to assign others. If it has none, it was stopped or cancelled, and remains so.
        if self.desired and len(self.desired) not in self._planner.allowed_counts:
            self.desired = group.nodes if isinstance(phase, (Running, Regrouping)) else frozenset()
        return True

    def _slot_lost(self, event: on.SlotLost) -> None:
        participant = self.participants.get(event.slot)
        if participant is None:
            return
        missed = self._processes.remove(participant)
        if missed and self.over:
            self._processes.dismiss(self.participants.values(), abort=True)
        elif missed:
            self._processes.blame(participant.slot, participant.node)
            self._recovery.miss(participant, Failure(event.reason, event.crash))
        self._end_group_if_empty()

    def _recover(self, *, with_newcomers: bool) -> None:
        """Continue with the survivors, or, if none of them has the state, from the newest checkpoint."""
        error = self._recovery.count()
        if self._processes.group is None:
            return
        if error is not None:
            self._fail(error)
            return
        if not isinstance(self.phase, Abandoning):
            if ranks := self._recovery.regroup(with_newcomers=with_newcomers):
                if self.request.options.replicas > 1:  # whatever the planner has chosen from the nodes that are left
                    self.desired = frozenset(self.participants[slot].place for slot in ranks)
                    self._planner.hold(self.desired)
                return
            self._do(do.CountRestart())
            self._processes.abandon()
        self._end_group_if_empty()

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def _reported(self, participant: Participant, report: Report) -> None:
        match report:
            case Progress():
                if not self.over:
                    if self.goal is not Goal.HOLD:  # else it was sent before the directory failed
                        self._do(do.ForgetStorage())
                    self._take_progress(report)
                    self._describe_model(report)
                    self._observe(report)
            case GroupFailed():
                self._group_failed(participant, report)
            case Joined():
                if not participant.has_state:
                    self._failing_nodes.clear()
                self._processes.joined(participant, report)
            case Noted():
                if not self.over:
                    self._tracker.note(report.note)
            case _:  # Ready
                participant.ready = self._response.now

    def _observe(self, progress: Progress) -> None:
        if self.progress is progress and isinstance(self.phase, Running):
            group = self.phase.group
            self._do(do.Observe(group.number, group.nodes, len(group.ranks), progress))

    def _describe_model(self, progress: Progress) -> None:
        if isinstance(self.phase, Running):
            group = self.phase.group
            try:
                self._planner.describe_model(progress, len(group.ranks) // len(group.nodes))
            except InvalidApp as error:
                self._fail(error)

    def _take_progress(self, progress: Progress) -> None:
        first = self._processes.report_training()
        if first and progress.resumed_from is not None:
            resumed = record.FragmentResumed(
                self.name,
                progress.resumed_from,
                progress.slot_seconds,
                progress.from_memory,
                self._tracker.furthest,
            )
            self._log(resumed)
        self._tracker.take(progress, self._response.now)
        self._planner.advance(progress)

    def _run_over(self, participant: Participant, message: RunEnded) -> None:
        self._do(do.Release(participant.slot))
        group, end = self._processes.group, message.end
        first = group is not None and participant.slot == group.first
        if first and isinstance(end, (RunFinished, RunPaused)) and not self.over:
            self._take_progress(end.progress)
        if isinstance(end, PeersFailed):
            self._tracker.reached(end.step)
            self._recovery.exclude_unreachable(end, self._registry)
        missed = self._processes.remove(participant)
        match end:
            case StorageFailed():
                self._hold(end.condition)
            case RunFailed():
                self._raised(participant, end, message.payload, missed=missed)
            case RunFinished():
                if first:
                    self._finish(do.Resolve(message.payload, message.stored))
                elif missed and (change := self._processes.change) is not None and change.failure and not change.begun:
                    # The others have missed the last result, and wait for it at their meeting.
                    self._recovery.note(Failure(f"{participant.node}: its process has finished", crash=False))
            case PeersFailed() | RunPaused(reason=PauseReason.LEFT):
                reason = end.reason if isinstance(end, PeersFailed) else end.reason.sentence
                if missed and participant.role is Role.MEMBER and not self.over:
                    self._recovery.note(Failure(reason, crash=False))
            case RunPaused():
                # A node is about to close, or the slot was commanded to end: all members pause.
                if missed and not self.over and not isinstance(self.phase, (Waiting, Pausing, Abandoning)):
                    self._processes.pause()
        self._end_group_if_empty()

    # ── the ends ──────────────────────────────────────────────────────────────────────────────────

    def _finish(self, result: do.Resolve) -> None:
        self._end()
        self._planner.finish()
        self._tracker.finish()
        self._do(result)
        others = list(self.participants.values())
        self._processes.dismiss([one for one in others if not one.has_state], abort=False)
        self._processes.dismiss([one for one in others if one.group_failed is not None], abort=True)

    def _fail(self, error: BaseException | bytes) -> None:
        if self.over:
            return
        self._planner.fail()
        self._do(do.Fail(error))
        self._end()
        self._processes.dismiss(self.participants.values(), abort=True)
        self._end_group_if_empty()  # all its members may have failed

    def _end(self) -> None:
        self._note_stall("")
        self._recovery.pending = None
        self._processes.end()

    def _cancel(self) -> None:
        if self.over or self.goal is Goal.CANCEL:
            return
        self.goal, self.desired = Goal.CANCEL, frozenset()
        self._planner.fail()
        self._log(record.TrainingCancelled(self.name))

    def _refuse_if_too_large(self, machine: on.MachineSized) -> None:
        needed, by_kind = -(-self.request.min_nodes // self._units_per_node), machine.by_kind
        kinds = self.request.node_kinds or by_kind
        nodes = max((by_kind[kind] for kind in kinds if kind in by_kind), default=machine.nodes)
        if self.over or self._processes.group is not None or needed <= nodes:
            return
        self._fail(
            InvalidApp(
                f"training job {self.name!r} needs {needed} nodes at the same time, but there are only {nodes} for its "
                "blocks: lower min_nodes, min_accelerators or accelerators, or use a larger partition"
            )
        )

    # ── the checkpoint directory ──────────────────────────────────────────────────────────────────

    def _hold(self, condition: str) -> None:
        """Take the training job off its nodes: it cannot start or continue without the checkpoint directory."""
        if self.over or self.goal is not Goal.TRAIN:
            return
        self.goal, self.desired = Goal.HOLD, frozenset()
        self._planner.withhold()
        self._do(do.AwaitStorage(condition))
        self._recovery.pending = None
        if self._processes.group is not None:
            self._processes.abandon()
        else:
            self._processes.dismiss(self.participants.values(), abort=True)

    def _wait_for_storage(self, condition: str, until: float) -> None:
        if self.goal is Goal.HOLD and not self.over:
            self._tracker.storage_problem = condition
            self._log(record.TrainingWaits(self.name, condition, until))

    def _try_again(self) -> None:
        if self.goal is Goal.HOLD and not self.over:
            self.goal, self._tracker.storage_problem = Goal.TRAIN, ""
            self._log(record.TrainingTriesAgain(self.name))
            self._planner.submit()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────

    def _end_group_if_empty(self) -> None:
        if self._recovery.pending is None:
            self._processes.end_group_if_empty()

    def _log(self, entry: record.Record) -> None:
        self._response.log(entry)

    def _do(self, command: Command) -> None:
        self._response.do(command)
