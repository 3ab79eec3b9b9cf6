"""The state machine of a cohort: training jobs of one function that may run fused, in arrays.

The planner knows a cohort as one trainer. An array runs in each slot of the nodes that it assigns; its members are
chosen when it starts, and further ones follow as it finds out how many it can train, or as members end. A member that
leaves an array, because it is paused or its process has failed, goes back to the queue, and on from its checkpoint in
another array. Pure, as `TrainingMachine`: events in, commands out; each command concerns one member, or all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import TrainingCancelled
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.executor.jobs import events as on
from freetrain_parsl.executor.jobs.commands import Response
from freetrain_parsl.executor.jobs.training.progress import ProgressTracker, waiting_reason
from freetrain_parsl.extensions.fusion.driver.arrays import CohortArrays
from freetrain_parsl.extensions.fusion.driver.cohort_trainer import CohortTrainer
from freetrain_parsl.extensions.fusion.driver.members import (
    CohortMember,
    JoinCohort,
    MemberGoal,
    MemberResponse,
    Refuse,
    TrainAlone,
)
from freetrain_parsl.extensions.fusion.messages import FAILED, ArraySized, BaseShared, MemberEnded, MemberReport
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import RunEnded
from freetrain_parsl.protocol.reports import (
    PauseReason,
    PeersFailed,
    RunFailed,
    RunFinished,
    RunPaused,
    StorageFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.jobs.commands import Addressed, Command
    from freetrain_parsl.executor.jobs.events import Event
    from freetrain_parsl.executor.jobs.request import Limits, TrainingRequest
    from freetrain_parsl.extensions.fusion.driver.gathering import CohortKey
    from freetrain_parsl.extensions.fusion.driver.members import RunningArray
    from freetrain_parsl.planning.model import CostsInSeconds
    from freetrain_parsl.protocol.messages import RunMessage
    from freetrain_parsl.protocol.reports import Progress, RunEnd

__all__ = ["Cohort"]

_OWN_ERRORS = ("NonFiniteLoss", "UsageError", "CheckpointMismatch", "CodeChanged")  # not caused by an array
_UNSUPPORTED = "it has a sharded model, a GradScaler, or a loader with an option that arrays do not support"
_DIFFERENT = "its model, its optimizer or its batch size differs from those of the other training jobs"
_REGROUPED = 10.0  # seconds after which others of a kind have come
_MOST_CRASHES = 2  # of arrays, after which a member trains alone: it may be the cause


class Cohort:
    """Training jobs that may run fused, until the last of them has ended or left.

    Parameters
    ----------
    name
        Its name for the planner.
    limits
        See `Limits`.
    costs
        Rescale costs of members that do not state them, until they are measured.
    slots_per_unit, units_per_node
        Number of slots of a unit that the planner assigns, and of units of a node: one of them is 1.
    numbers
        Yields numbers that are unique within the driver.
    best_rate
        Returns the samples per second of a node assumed for training jobs that have not been measured.
    key
        Equal for its training jobs. Its structure, if empty, becomes that of the first that reports one.
    now
        Seconds.
    differ
        How its training jobs differ from others that they were with before; empty: they are all that there are.
    """

    states_curve = True
    waits_for_nodes = False
    forming = None

    def __init__(
        self,
        name: str,
        requests: Sequence[TrainingRequest],
        *,
        key: CohortKey,
        limits: Limits,
        costs: CostsInSeconds,
        slots_per_unit: int,
        units_per_node: int,
        numbers: Iterator[int],
        best_rate: Callable[[], float],
        now: float,
        differ: str = "",
    ) -> None:
        self.name, self.key = name, key
        self._differ = differ
        self._kept = 0  # members that are of its kind, as far as it is known
        self._formed = now
        self._limits = limits
        self._slots_per_unit, self._units_per_node = slots_per_unit, units_per_node
        limit = key.fusion.limit
        self._response = Response(now)
        self._trainer = CohortTrainer(name, limit, costs, slots_per_unit, best_rate, self._response)
        self._members: dict[str, CohortMember] = {}  # those that are not over, in the order of their submission
        self._answering: list[MemberResponse] = []  # those with commands
        self._arrays = CohortArrays(name, limit, self._trainer, self._response, numbers)
        self._desired: frozenset[str] = frozenset()
        self._holds = False  # the checkpoint directory cannot be used
        self._gain = 0.0  # of arrays of the best size
        self._measured = False  # whether an array has timed fused steps
        self._structure = key.structure
        self._stall = ""
        self._stands_since = now  # without an array, or without nodes
        self._commands: list[Addressed] = []
        self._registry: SlotRegistry
        self._add(requests)
        self._trainer.submit(self._members.values())

    # ── what others see ───────────────────────────────────────────────────────────────────────────

    @property
    def over(self) -> bool:
        """Whether no member is left."""
        return not self._members

    @property
    def ended(self) -> bool:
        """Whether, in addition, no array runs."""
        return self.over and not self._arrays

    def run_in(self, slot: str) -> int | None:
        """Return the number of its run in a slot."""
        array = self._arrays.in_slot(slot)
        return None if array is None else array.run

    @property
    def idle(self) -> bool:
        """Whether it neither runs nor has nodes assigned."""
        return not (self._arrays or self._desired)

    def submit(self) -> list[Addressed]:
        """Return the commands for a new cohort."""
        return self._take()

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, registry: SlotRegistry, now: float) -> list[Addressed]:  # noqa: C901 - a case for each event
        """Handle an event, and return the resulting commands; see `HeldJob`."""
        self._registry, self._response.now = registry, now
        match event:
            case on.TimePassed():
                self._tick()
            case on.Assigned():
                if not self._holds:
                    if not self._desired:
                        self._stands_since = now
                    self._desired = event.nodes
            case on.Said(slot, message):
                if (array := self._arrays.of_run(slot, message.run)) is not None:
                    self._said(array, message)
            case on.SlotLost():
                self._slot_lost(event)
            case on.Extended():
                self._add(event.requests)
            case on.Cancelled():
                self._cancel(event.training)
            case on.Failed():
                self._fail(event.error)
            case on.StoragePostponed():
                for member in self._members.values():
                    member.response.log(record.TrainingWaits(member.name, event.condition, event.until))
            case on.StorageBack():
                self._try_again()
        return self._take()

    def _said(self, array: RunningArray, message: RunMessage) -> None:
        match message:
            case MemberReport() if message.member in array.members:
                self._member_reported(array, array.members[message.member], message.report)
            case MemberEnded() if message.member in array.members:
                self._member_over(array, array.members[message.member], message)
            case ArraySized():
                self._sized(array, message)
            case BaseShared():
                array.base = message.size
                self._note_base(array)
            case RunEnded():
                self._run_over(array, message.end)

    def _add(self, requests: Iterable[TrainingRequest]) -> None:
        """Add training jobs; they wait until an array has room for them."""
        for request in requests:
            response = MemberResponse(request.name, self._response.now, self._answering)
            member = CohortMember(request, response, ProgressTracker(request.name, self._limits.max_restarts, response))
            self._members[member.name] = member
            self._arrays.queue.append(member)
            self._kept += 1
        self._log(record.CohortJoined(self.name, [request.name for request in requests]))
        self._trainer.update(self._members.values())

    def _cancel(self, name: str) -> None:
        """End a member, with its state saved."""
        member = self._members.get(name)
        if member is None or member.goal is MemberGoal.CANCEL:
            return
        member.goal = MemberGoal.CANCEL
        member.response.log(record.TrainingCancelled(name))
        self._dismiss(member)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        leaving = self._registry.closing(self._desired | {array.place for array in self._arrays})
        wanted = frozenset() if self._holds or self.over else self._desired - leaving
        for array in self._arrays:
            if array.deadline is not None and self._response.now > array.deadline:
                self._do(do.Kill(array.slot, "it did not exit in time"))
            for member in array.members.values():
                member.explain_stall(array, self._response.now)
        if wanted and len(self._members) <= len(wanted):
            self._use_all_nodes()
        count = sum(member.goal is MemberGoal.TRAIN for member in self._members.values())
        self._arrays.place(self._free(wanted), wanted=wanted, leaving=leaving, members=count)
        if self._members:
            self._trainer.update(self._members.values())
        self._explain_stall()
        self._explain_single()

    def _explain_stall(self) -> None:
        """Record why no array runs; why a member is in none of those that run follows from their number."""
        if self._arrays or self.over or self._holds:
            self._stands_since = self._response.now
        reason = waiting_reason(
            self._desired, 1, self._response.now - self._stands_since, shared=self._units_per_node > 1
        )
        if reason != self._stall:
            self._stall = reason
            self._log(record.CohortStalled(self.name, reason))

    def _use_all_nodes(self) -> None:
        """Let members train alone on whole units if each can have one or more, and could use more than one slot."""
        for member in list(self._members.values()):
            if self._slots_per_unit > 1 or member.request.max_nodes > 1:
                self._leave(member, "")

    def _free(self, places: Iterable[str]) -> list[Slot]:
        """Return the idle slots of these units."""
        slots = [self._registry.complete_slots([place]) or [] for place in sorted(places)]
        return [slot for each in slots for slot in each if slot.busy is None and not slot.leaving]

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def _member_reported(self, array: RunningArray, member: CohortMember, progress: Progress) -> None:
        if not array.trains:
            array.trains = True
            self._trainer.started(self._response.now - array.started)
            if not self._holds:  # else it was sent before the directory failed
                self._do(do.ForgetStorage())
        self._take_progress(array, member, progress)
        self._check_structure(array, member)
        if progress.rate is not None:
            self._trainer.measured_rate(len(array.members), progress.rate)

    def _check_structure(self, array: RunningArray, member: CohortMember) -> None:
        """Let a member leave that cannot be fused at all, or not with the others."""
        known, own = self._structure, member.structure
        if not known or own.startswith(f"{known}/"):  # more is known of what its members have in common
            self._structure = known = own
        if not own:
            self._leave(member, member.not_fused or _UNSUPPORTED)
        elif own != known and not known.startswith(f"{own}/") and member.goal is MemberGoal.TRAIN:
            member.goal = MemberGoal.REGROUP
            self._kept -= 1
            self._differ = member.differs = member.not_fused or self._differ or _DIFFERENT
            self._arrays.release(array, member.name)

    def _explain_single(self) -> None:
        """Record why a member has nobody to be fused with."""
        if self._kept == 1 and self._differ and self._response.now - self._formed > _REGROUPED:
            for member in self._members.values():
                member.response.log(record.TrainsAlone(member.name, self._differ))
            self._differ = ""

    def _take_progress(self, array: RunningArray, member: CohortMember, progress: Progress) -> None:
        if member.began is None:
            member.began = self._response.now
            started = record.FragmentStarted(member.name, array.run, [array.place], False, 0.0, array.name)  # noqa: FBT003
            member.response.log(started)
            if progress.resumed_from is not None:
                member.response.log(record.FragmentResumed(member.name, progress.resumed_from, progress.slot_seconds))
            member.shares = (0, "")
            member.note_base(array)
        member.tracker.take(progress, self._response.now)

    def _sized(self, array: RunningArray, sized: ArraySized) -> None:
        if sized.turns:
            self._take_turns(array, sized)
            return
        if sized.reason and not sized.fused:
            if len({member.structure for member in array.members.values()}) > 1:  # those that differ leave
                self._differ = sized.reason
                for member in array.members.values():
                    member.differs = member.differs and sized.reason
            elif all(member.goal is not MemberGoal.REGROUP for member in array.members.values()):
                self._refuse(array, sized)
            return
        array.size = sized.size
        if sized.reason:  # the array was too large
            self._arrays.limit_to(sized.size)
            return
        decided = sized.decided and sized.fused
        if decided:
            self._trainer.in_turns = False
        if sized.gain_size > 1:  # else nothing was timed
            if not self._trainer.in_turns:  # else it did not pay elsewhere
                self._trainer.measured_gain(sized.gain_size, sized.gain)
            if decided or not self._measured:  # a short sweep ends before the best size is known
                self._log_measured(sized)
        if decided and sized.gain > self._gain:  # else another array has found a better size
            self._arrays.size, self._arrays.turns, self._gain = sized.size, "", sized.gain

    def _log_measured(self, sized: ArraySized) -> None:
        self._log(record.ArrayMeasured(self.name, sized.gain_size, sized.gain))
        self._measured = True

    def _take_turns(self, array: RunningArray, sized: ArraySized) -> None:
        """Leave members in their array that are not fused, as most of their memory is one base."""
        array.size, array.turns = sized.size, sized.turns
        self._log_measured(sized)
        self._note_base(array)
        if not self._gain:  # else fusing pays elsewhere
            self._arrays.size, self._arrays.turns = sized.size, sized.turns
            self._trainer.takes_turns()

    @staticmethod
    def _note_base(array: RunningArray) -> None:
        for member in array.members.values():
            member.note_base(array)

    def _refuse(self, array: RunningArray, sized: ArraySized) -> None:
        """Let all members train alone."""
        tried = frozenset(member.request.likeness for member in array.members.values())
        timed, failed = sized.gain_size > 1, sized.reason.startswith(FAILED)  # other nodes, or the next try, may do
        lasting = not (timed or failed or sized.passing)
        self._do(Refuse(sized.reason, tried, lasting))
        for member in list(self._members.values()):
            self._leave(member, sized.reason)

    def _leave(self, member: CohortMember, reason: str) -> None:
        """Let a member train alone, once it has left its array."""
        if member.goal is MemberGoal.TRAIN:
            member.goal, member.alone_because = MemberGoal.ALONE, reason
            self._dismiss(member)

    def _dismiss(self, member: CohortMember) -> None:
        """Make a member leave its array, or the queue."""
        array = self._arrays.with_member(member.name)
        if array is not None:
            self._arrays.release(array, member.name)
        else:
            self._back(member)

    # ── the ends ──────────────────────────────────────────────────────────────────────────────────

    def _member_over(self, array: RunningArray, member: CohortMember, message: MemberEnded) -> None:
        end = message.end
        if isinstance(end, RunFinished) or (isinstance(end, RunPaused) and end.reason is not PauseReason.LEFT):
            self._take_progress(array, member, end.progress)
        self._part(array, member, failure=False)
        match end:
            case RunFinished():
                member.tracker.finish()
                member.response.do(do.Resolve(message.payload, message.stored))
                self._forget(member)
            case RunFailed():
                self._failed(array, member, end, message.payload)
            case StorageFailed():
                self._back(member)
                self._hold(end.condition)
            case RunPaused() | PeersFailed():
                self._back(member)

    def _failed(self, array: RunningArray, member: CohortMember, end: RunFailed, payload: bytes) -> None:
        """Fail a member, unless the array may be the cause: then it is repeated alone, from its checkpoint."""
        if not array.shared or end.reason.startswith(_OWN_ERRORS) or member.goal is MemberGoal.CANCEL:
            member.response.do(do.Fail(payload))
            self._forget(member)
            return
        member.goal, member.alone_because = MemberGoal.ALONE, f"it failed in an array, {end.reason}"
        self._back(member)

    def _run_over(self, array: RunningArray, end: RunEnd) -> None:
        self._do(do.Release(array.slot))
        self._end(array, failure=False)
        for member in list(array.members.values()):
            self._part(array, member, failure=False)
            if isinstance(end, RunFailed) and member.goal is MemberGoal.TRAIN:
                member.goal, member.alone_because = MemberGoal.ALONE, end.reason
            self._back(member)

    def _slot_lost(self, event: on.SlotLost) -> None:
        array = self._arrays.in_slot(event.slot)
        if array is None:
            return
        self._end(array, failure=True)
        if event.crash:
            self._do(do.CountRestart())
        for member in list(array.members.values()):
            self._part(array, member, failure=True)
            if event.crash:
                member.crashes += 1
            if member.crashes >= _MOST_CRASHES and member.goal is MemberGoal.TRAIN:
                member.goal = MemberGoal.ALONE
                member.alone_because = f"{member.crashes} arrays crashed in which it trained, the last: {event.reason}"
            self._back(member)

    def _end(self, array: RunningArray, *, failure: bool) -> None:
        self._arrays.remove(array)
        seconds = max(0.0, self._response.now - array.started)
        self._log(record.ArrayEnded(self.name, array.name, array.place, failure, seconds, array.slot))

    def _part(self, array: RunningArray, member: CohortMember, *, failure: bool) -> None:
        """Take a member out of its array."""
        del array.members[member.name]
        array.releasing.discard(member.name)
        member.note_stall("")
        if member.began is not None:
            seconds = max(0.0, self._response.now - member.began)
            counted = member.tracker.counted_seconds
            member.response.log(
                record.FragmentEnded(member.name, array.run, [array.place], failure, seconds, array.name, counted)
            )
            member.began = None

    def _back(self, member: CohortMember) -> None:
        """Do what a member that is in no array is to do next."""
        queue = self._arrays.queue
        if member in queue:
            queue.remove(member)
        match member.goal:
            case MemberGoal.TRAIN:
                begun = sum(each.tracker.latest is not None for each in queue)
                queue.insert(begun if member.tracker.latest is not None else len(queue), member)
            case MemberGoal.REGROUP:
                member.response.do(JoinCohort(member.structure, member.differs))
                self._forget(member)
            case MemberGoal.ALONE:
                member.response.do(TrainAlone(member.alone_because))
                self._forget(member)
            case MemberGoal.CANCEL:
                member.response.do(do.Fail(TrainingCancelled(f"training job {member.name!r} was cancelled")))
                self._forget(member)

    def _forget(self, member: CohortMember) -> None:
        self._collect()  # its last commands
        del self._members[member.name]
        if not self._members:
            self._trainer.finish()
            for array in self._arrays:
                self._arrays.pause(array)

    def _fail(self, error: Exception) -> None:
        for member in list(self._members.values()):
            array = self._arrays.with_member(member.name)
            if array is not None:
                self._part(array, member, failure=False)
            if member in self._arrays.queue:
                self._arrays.queue.remove(member)
            member.response.do(do.Fail(unshared(error)))
            self._forget(member)
        for array in self._arrays:
            array.deadline = self._response.now + self._limits.peer_timeout

    # ── the checkpoint directory ──────────────────────────────────────────────────────────────────

    def _hold(self, condition: str) -> None:
        """Take the cohort off its nodes: it cannot start or continue without the checkpoint directory."""
        if self._holds or self.over:
            return
        self._holds, self._desired = True, frozenset()
        self._trainer.withhold()
        self._do(do.AwaitStorage(condition))

    def _try_again(self) -> None:
        if self._holds and not self.over:
            self._holds = False
            for member in self._members.values():
                member.response.log(record.TrainingTriesAgain(member.name))
            self._trainer.submit(self._members.values())

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────

    def _take(self) -> list[Addressed]:
        """Return the commands so far, and start with none again."""
        self._collect()
        commands, self._commands = self._commands, []
        return commands

    def _collect(self) -> None:
        """Take the commands so far: those to slots in order, which a member's follow."""
        self._commands += [(self.name, command) for command in self._response.take()]
        for response in self._answering:
            self._commands += [(response.name, command) for command in response.take()]
        self._answering.clear()

    def _log(self, entry: record.Record) -> None:
        self._response.log(entry)

    def _do(self, command: Command) -> None:
        self._response.do(command)
