"""The job manager: holds the driver's jobs, passes events to them, and carries out their commands."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import FreeTrainError, InvalidApp, TrainingCancelled
from freetrain_parsl.executor.driver.rendezvous import RendezvousServer
from freetrain_parsl.executor.driver.settler import settle_at_once, unshared
from freetrain_parsl.executor.driver.storage_watch import StorageWatch
from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.executor.jobs import events as on
from freetrain_parsl.executor.jobs.curve_learning import CurveKeeper, CurveLearning
from freetrain_parsl.executor.jobs.port import JOBS, JobKind
from freetrain_parsl.executor.jobs.training.machine import TrainingMachine
from freetrain_parsl.executor.jobs.training.progress import FailureRate
from freetrain_parsl.executor.payloads.payloads import error_in, settle_with_error, settle_with_value
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import RunReport, RunStart, WithFunction
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.storage.root import probe_root
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from freetrain_parsl.executor.driver.settler import Settle
    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.jobs.commands import Addressed, Command
    from freetrain_parsl.executor.jobs.events import Event
    from freetrain_parsl.executor.jobs.port import HeldJob
    from freetrain_parsl.executor.jobs.request import SharedSettings, Training
    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.messages import RunMessage, StoreRequest, ToSlot
    from freetrain_parsl.protocol.options import SessionOptions

logger = logging.getLogger(__name__)

__all__ = ["JobManager"]


@dataclass(eq=False)
class _Held:
    """A job with its kind, and its training jobs by name."""

    kind: JobKind
    job: HeldJob
    trainings: dict[str, Training]
    look_at: float = 0.0
    """Time of the next look at it: every turn, unless it waits for nodes or is settled."""
    settled: bool = False
    """Whether it was settled at the last one: a change of any slots can be of interest to it."""


class _Trainings(JobKind):
    """Training jobs that no other kind has taken, each as a job of its own."""

    def submit(self, training: Training) -> bool:
        jobs = self.jobs
        jobs.curves.recall(training.name, training.rates)
        settings = jobs.settings
        machine = TrainingMachine(
            training.request,
            settings.limits,
            settings.costs,
            jobs.numbers,
            jobs.clock(),
            units_per_node=jobs.registry.units_per_node,
            sharded_on=training.sharded_on,
        )
        jobs.hold(self, machine, [training])
        return True


def _is_progress(event: Event) -> bool:
    message = event.message if isinstance(event, on.Said) else None
    return isinstance(message, RunReport) and isinstance(message.report, Progress)


class JobManager:
    """Manages all jobs of the driver. Owned by the control loop's thread.

    Parameters
    ----------
    settings
        See `SharedSettings`.
    registry
        The slots.
    send
        Sends a message to a slot.
    kill
        Kills and drops a slot that does not end: (slot, reason).
    set_aside
        Takes a slot's unit out of the pool for some time: (slot, reason).
    inform
        Passes events to the planner.
    journal
        Records events.
    clock
        Seconds since the epoch, never stepped.
    settle
        Calls a function that settles a future, now or later.

    Notes
    -----
    Ten thousand training jobs may wait at a time: an operation on one of them must not loop over the others.
    """

    _LOOK = 10.0  # seconds between looks at a job that waits for nodes: time only explains why it waits
    _LOOKS = 20  # jobs that are looked at between messages: a look takes up to a millisecond or two
    _LOOK_SETTLED = 1.0  # seconds between looks at a settled one, for what follows from no event: it makes no step

    def __init__(
        self,
        settings: SharedSettings,
        *,
        registry: SlotRegistry,
        send: Callable[[str, ToSlot], object],
        kill: Callable[[Slot, str], None],
        set_aside: Callable[[Slot, str], None] = lambda _slot, _reason: None,
        inform: Callable[[planner.Event], None],
        journal: Journal,
        clock: Callable[[], float],
        settle: Settle = settle_at_once,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.clock = clock
        self.numbers: Iterator[int] = count(1)
        speeds = {kind: slots.speed for kind, slots in registry.kinds.items() if kind}
        self.curves = CurveLearning(speeds, registry.units_per_node)
        self.rendezvous = RendezvousServer(send)
        self._send = send
        self._kill = kill
        self._set_aside = set_aside
        self._inform = inform
        self._journal = journal
        self._settle = settle
        self._failure_rate = FailureRate()
        self._latest_options = settings.options, settings.options
        """Options of a training job, and the same with the executor's."""
        self._storage = StorageWatch(
            lambda: probe_root(settings.options.checkpoint_root, settings.options.root_identity), clock
        )
        self._keeper = CurveKeeper(settings.options.checkpoint_root)
        kinds = [kind(self) for kind in JOBS.usable()]
        self._jobs: dict[JobKind, list[_Held]] = {kind: [] for kind in (*kinds, _Trainings(self))}
        """In the order in which they are offered training jobs, and advanced."""
        self._by_name: dict[str, _Held] = {}
        self._by_future: dict[Future[Any], tuple[_Held, str]] = {}
        """Future -> the job to which its training job was added last, and its name."""
        self._by_slot: dict[str, _Held] = {}
        """Slot -> the job that was last started there."""
        self._seen_changes = 0
        """Of the slots, when settled jobs were looked at."""
        self._machine: on.MachineSized | None = None

    @property
    def gathers(self) -> bool:
        """Whether there are training jobs that the planner does not know yet."""
        return any(kind.gathers for kind in self._jobs)

    # Jobs, as their kinds make them.

    def offer(self, training: Training, after: JobKind | None = None) -> None:
        """Offer a training job to the kinds, or to those after one of them."""
        kinds = list(self._jobs)
        any(kind.submit(training) for kind in kinds[0 if after is None else kinds.index(after) + 1 :])

    def hold(self, kind: JobKind, job: HeldJob, trainings: Iterable[Training]) -> None:
        """Hold a new job of these training jobs."""
        held = _Held(kind, job, {})
        self._jobs[kind].append(held)
        self._by_name[job.name] = held
        self._add(held, trainings)
        self._carry_out(held, job.submit())
        if self._machine is not None:
            self._handle(held, self._machine)

    def extend(self, job: HeldJob, trainings: Sequence[Training]) -> None:
        """Add training jobs to a job."""
        held = self._by_name[job.name]
        self._add(held, trainings)
        self._handle(held, on.Extended([training.request for training in trainings]))

    def _add(self, held: _Held, trainings: Iterable[Training]) -> None:
        for training in trainings:
            if (before := held.trainings.get(training.name)) is not None:  # of the same name, which is over
                self._by_future.pop(before.future, None)
            held.trainings[training.name] = training
            self._by_future[training.future] = held, training.name

    # Requests of the user, the planner and the control loop.

    def submit(self, training: Training) -> None:
        """Add a new training job, which waits for nodes."""
        request = training.request
        self.log(record.TrainingSubmitted(training.name, request.min_nodes, request.max_nodes, request.samples))
        self.offer(training)

    def machine_has(self, nodes: int | None, by_kind: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set the total number of nodes, if known, and the number of each kind; training jobs that need more fail."""
        machine = None if nodes is None else on.MachineSized(nodes, dict(by_kind))
        if machine not in (None, self._machine):
            self._tell_all(machine)
        self._machine = machine

    def cancel(self, future: Future[Any]) -> None:
        """End a training job with a checkpoint, if it is not over, and take its nodes away."""
        for training in self._withdraw(future):
            self.log(record.TrainingCancelled(training.name))
            self._fail(training, TrainingCancelled(f"training job {training.name!r} was cancelled"))
            return
        if future in self._by_future:
            held, name = self._by_future[future]
            self._handle(held, on.Cancelled(name))

    def assign(self, name: str, nodes: frozenset[str]) -> None:
        """Set the nodes on which a job should run."""
        if (held := self._by_name.get(name)) is not None:
            self._handle(held, on.Assigned(nodes))

    def fail_waiting(self, error: Exception) -> None:
        """Fail the jobs that are not running and have no nodes assigned."""
        self._fail_gathered(error)
        for held in self._all():
            if held.job.idle:
                self._handle(held, on.Failed(error))

    def fail_all(self, error: Exception) -> None:
        """Fail every training job."""
        self._fail_gathered(error)
        self._tell_all(on.Failed(error))

    def _fail_gathered(self, error: Exception) -> None:
        for training in self._withdraw(None):
            self._fail(training, unshared(error))

    def _withdraw(self, future: Future[Any] | None) -> Iterator[Training]:
        return chain.from_iterable(kind.withdraw(future) for kind in self._jobs)

    def close(self) -> None:
        """Keep the learned scaling curves: the run is over."""
        self._keeper.close()

    def advance(self, receive: Callable[[], object] = lambda: None) -> None:
        """Advance every job one step towards its assignment; `receive` handles messages, from time to time."""
        self._watch_storage()
        changed, self._seen_changes = self.registry.slots.changes != self._seen_changes, self.registry.slots.changes
        for kind, jobs in self._jobs.items():
            kind.advance()
            now = self.clock()
            for number, held in enumerate([one for one in jobs if one.look_at <= now or (changed and one.settled)], 1):
                group = held.job.forming
                arrived = frozenset() if group is None else self.rendezvous.arrived(self._store(held, group))
                self._handle(held, on.TimePassed(arrived))
                held.settled = held.job.settled
                if held.settled or held.job.waits_for_nodes:
                    held.look_at = now + (self._LOOK_SETTLED if held.settled else self._LOOK)
                if number % self._LOOKS == 0:
                    receive()
            if gone := [one for one in jobs if one.look_at <= now and one.job.ended]:
                self._forget(jobs, gone)

    def _forget(self, jobs: list[_Held], gone: Collection[_Held]) -> None:
        for held in gone:
            for training in held.trainings.values():
                if self._by_future.get(training.future) == (held, training.name):  # else it is in another job by now
                    del self._by_future[training.future]
            if self._by_name.get(held.job.name) is held:  # else there is another one of this name by now
                del self._by_name[held.job.name]
        forgotten = set(gone)
        self._by_slot = {slot: one for slot, one in self._by_slot.items() if one not in forgotten}
        jobs[:] = [one for one in jobs if one not in forgotten]

    # Messages of slots. A slot's messages arrive in order, and it has one assignment at a time.

    def on_message(self, slot: Slot, message: RunMessage) -> None:
        """Handle a message about a run."""
        self._tell(slot, on.Said(slot.name, message))

    def on_heartbeat(self, slot: Slot, waited: float) -> None:
        """Record how long a member has been waiting for the others; nearly always it has not, and had not."""
        if waited or slot.waited:
            slot.waited = waited
            self._tell(slot, on.Heartbeat(slot.name, waited))

    def on_lost(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Handle the failure of a slot; a `crash` is a failure that the batch system did not cause."""
        self._tell(slot, on.SlotLost(slot.name, reason, crash))

    def on_store_request(self, slot: Slot, message: StoreRequest) -> None:
        """Answer a call to a rendezvous store of the job that the slot runs."""
        held = self._of(slot)
        own = held is not None and message.group.rpartition("/")[0] == held.job.name
        self.rendezvous.handle(slot.name, message, self.clock(), own=own)

    def run_of(self, slot: Slot) -> int | None:
        """Return the number of a slot's current run."""
        held = self._by_slot.get(slot.name)
        return None if held is None else held.job.run_in(slot.name)

    # Events and commands.

    def _all(self) -> list[_Held]:
        return list(chain.from_iterable(self._jobs.values()))

    def _of(self, slot: Slot) -> _Held | None:
        return None if self.run_of(slot) is None else self._by_slot[slot.name]

    def _tell(self, slot: Slot, event: Event) -> None:
        """Pass an event to the job that runs in a slot."""
        if (held := self._of(slot)) is not None:
            self._handle(held, event)

    def _tell_all(self, event: Event) -> None:
        for held in self._all():
            self._handle(held, event)

    def _handle(self, held: _Held, event: Event) -> None:
        if not (held.settled and _is_progress(event)):
            held.look_at = 0.0
        self._carry_out(held, held.job.handle(event, self.registry, self.clock()))

    def _carry_out(self, held: _Held, commands: Iterable[Addressed]) -> None:
        for name, command in commands:
            self._do(held, name, held.trainings.get(name), command)

    def _do(self, held: _Held, name: str, training: Training | None, command: Command) -> None:  # noqa: C901 - a case for each
        """Carry out a command.

        Parameters
        ----------
        held
            The job.
        name, training
            The training job that it concerns; ``None``: all training jobs of the job, whose name it is.
        command
            The command.
        """
        slots = self.registry.slots  # without those that were dropped by an earlier command
        match command:
            case do.Send(slot, message) if slot in slots:
                self._send_to(slots[slot], held, training, message)
            case do.Release(slot) if slot in slots:
                slots[slot].busy = None
            case do.Kill(slot, reason) if slot in slots:
                self._kill(slots[slot], reason)
            case do.SetAside(slot, reason) if slot in slots:
                self._set_aside(slots[slot], reason)
            case do.OpenStore(group):
                self.rendezvous.open(self._store(held, group))
            case do.CloseStore(group):
                self.rendezvous.close(self._store(held, group))
            case do.AwaitStorage(condition):
                until = self._storage.hold(held.job.name)
                self._handle(held, on.StoragePostponed(condition, until))
            case do.ForgetStorage():
                self._storage.drop(held.job.name)
            case do.CountRestart():
                self._failure_rate.failures += 1
            case do.Inform(event):
                self._inform(self.curves.completed(event, stated=held.job.states_curve))
            case do.Observe():
                self._learn(held, training, command)
            case do.KeepProgress(progress):
                self._journal.keep_progress(self.clock(), name, progress)
            case do.Log(entry):
                self.log(entry)
            case do.Resolve(payload, stored):
                assert training is not None
                self._journal.commit()  # before code that waits for the future reads the journal
                value = payload if stored is None else stored
                self._settle(partial(settle_with_value, training.future, value, self.settings.values))
            case do.Fail(error):
                assert training is not None
                self._fail(training, error_in(error) if isinstance(error, bytes) else error)
            case do.OwnCommand():
                held.kind.carry_out(held.job, training, command)

    def _send_to(self, slot: Slot, held: _Held, training: Training | None, message: RunMessage) -> None:
        if isinstance(message, RunStart):
            slot.busy = held.job.name
            self._by_slot[slot.name] = held
        if isinstance(message, WithFunction):
            assert training is not None
            message = replace(message, options=self._completed(message.options), payload=training.payload)
        self._send(slot.name, message)

    def _completed(self, own: SessionOptions) -> SessionOptions:
        """Return a training job's options with the executor's; once for all slots of a group, which start together."""
        shared, time_between = self.settings.options, timedelta(seconds=self._failure_rate.mean_time_between)
        known, completed = self._latest_options
        if known is not own or completed.mean_time_between_failures != time_between:
            interval = own.checkpoint_interval
            completed = replace(
                own,
                checkpoint_root=shared.checkpoint_root,
                root_identity=shared.root_identity,
                checkpoint_interval=shared.checkpoint_interval if interval is None else interval,
                keep=shared.keep,
                save_margin=shared.save_margin,
                threads=shared.threads,
                mean_time_between_failures=time_between,
            )
            self._latest_options = own, completed
        return completed

    def _fail(self, training: Training, error: BaseException) -> None:
        if not isinstance(error, TrainingCancelled):  # recorded when it was requested
            final = not (isinstance(error, FreeTrainError) and error.resumable)
            self.log(record.TrainingFailed(training.name, f"{type(error).__name__}: {text_of(error)}", final))
        self._journal.commit()
        self._settle(partial(settle_with_error, training.future, error))

    def _learn(self, held: _Held, training: Training | None, seen: do.Observe) -> None:
        """Add a report of a group to a job's curve; change its batch if that pays."""
        name = held.job.name
        kinds = self.registry.kinds_on(seen.nodes)
        if len(kinds) != 1:
            return  # between two kinds
        kind = kinds.pop()
        changed = self.curves.observe(
            self.clock(),
            name,
            group=seen.group,
            nodes=len(seen.nodes),
            slots=seen.slots,
            progress=seen.progress,
            kind=kind,
        )
        for learned in changed:
            self._inform(learned)
        if training is not None and (key := training.curve_key) and changed and (rates := self.curves.measured(name)):
            self._keeper.keep(key, rates)
        if training is not None and training.curve_key and seen.progress.sharded_bytes:
            with suppress(InvalidApp):  # nodes of several processes of which no number is allowed: the job will say so
                allowed = seen.progress.allowed_counts.in_units(seen.slots // len(seen.nodes))
                self._keeper.keep_counts(training.curve_key, allowed)
        size = self.curves.next_batch(name, len(seen.nodes), kind)
        if size is not None:
            self._handle(held, on.BatchChosen(size))

    @staticmethod
    def _store(held: _Held, group: int) -> str:
        return f"{held.job.name}/{group}"

    def _watch_storage(self) -> None:
        """Let the jobs that wait for the checkpoint directory retry once it can be used."""
        ready, postponed = self._storage.turn()
        if not (ready or postponed):
            return
        for held in self._all():
            if held.job.name in postponed:
                self._handle(held, on.StoragePostponed(*postponed[held.job.name]))
            elif held.job.name in ready:
                self._handle(held, on.StorageBack())

    def log(self, entry: record.Record) -> None:
        """Write a record to the journal and, if a user should know it, to the log."""
        self._journal.write(self.clock(), entry)
        name = entry.subject
        match entry:
            case record.FragmentEnded(seconds=seconds, array="") | record.ArrayEnded(seconds=seconds):
                self._failure_rate.seconds += seconds
            case record.ArrayMeasured(members=members, gain=gain):
                logger.info("%s: %d training jobs fused are %.2f times as fast as one by one", name, members, gain)
            case record.TrainsAlone(reason=reason):
                logger.warning("training job %s is not fused: %s", name, reason)
            case record.CohortStalled(reason=reason) | record.TrainingStalled(reason=reason) if reason:
                logger.warning("%s %s", name, reason)
            case record.BatchChanged(size=size, before=before):
                logger.info("training job %s has batches of %d samples, before %d", name, size, before)
            case record.CodeChanged(note=note) | record.TrainingNoted(note=note):
                logger.warning("training job %s: %s", name, note)
            case record.TrainingWaits(reason=reason, until=until):
                logger.warning("training job %s waits: %s, next attempt in %.0f s", name, reason, until - self.clock())
            case record.TrainingTriesAgain():
                logger.info("training job %s tries again: the checkpoint directory can be used again", name)
            case record.SavingFails(reason=reason):
                logger.warning("training job %s cannot save: %s", name, reason)
            case record.SavingWorks():
                logger.info("training job %s saves again", name)
            case record.TrainingFinished(trained=False, step=step):
                logger.warning(
                    "training job %s: its result is that of an earlier run, whose checkpoint of step %d was complete: "
                    "nothing was trained; to train again, give it another name or remove its checkpoints",
                    name,
                    step,
                )
