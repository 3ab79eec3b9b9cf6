"""The training manager: translates messages into events of the trainings' state machines, and runs their commands."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.driver.rendezvous import RendezvousServer
from freetrain_parsl.executor.driver.settler import settle_at_once, unshared
from freetrain_parsl.executor.driver.storage_watch import StorageWatch
from freetrain_parsl.executor.jobs.command_runner import CommandRunner
from freetrain_parsl.executor.jobs.curve_learning import CurveKeeper, CurveLearning
from freetrain_parsl.executor.jobs.training import commands as do
from freetrain_parsl.executor.jobs.training import events as on
from freetrain_parsl.executor.jobs.training.machine import TrainingMachine
from freetrain_parsl.executor.jobs.training.states import Running
from freetrain_parsl.extensions.fusion.driver.kind import CohortManager
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.storage.root import probe_root

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from concurrent.futures import Future

    from freetrain_parsl.executor.driver.settler import Settle
    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.jobs.request import SharedSettings, Training
    from freetrain_parsl.executor.jobs.training.commands import Command
    from freetrain_parsl.executor.jobs.training.events import Event
    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.messages import MemberEnded, MemberReport, RunEnded, RunReport, StoreRequest, ToSlot

logger = logging.getLogger(__name__)

__all__ = ["TrainingManager"]


@dataclass
class _Managed:
    """A training with its state machine."""

    training: Training
    machine: TrainingMachine
    look_at: float = 0.0
    """When time may next have an effect; only a training that waits for nodes is not looked at in every turn."""

    @property
    def gone(self) -> bool:
        """Whether it is over, and all its processes have ended."""
        return self.machine.over and not self.machine.participants


class TrainingManager:
    """Manages all trainings of the driver. Owned by the control loop's thread.

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
        Takes a slot's node out of the pool for some time: (slot, reason).
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
    Ten thousand trainings may wait at a time: what concerns one of them must not look at the others.
    """

    _LOOK = 10.0  # seconds between looks at a training that waits for nodes: time only explains why it waits

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
        self._settings = settings
        self._registry = registry
        self._inform = inform
        self._clock = clock
        self._runner = CommandRunner(
            settings,
            registry=registry,
            send=send,
            kill=kill,
            set_aside=set_aside,
            inform=inform,
            journal=journal,
            clock=clock,
            settle=settle,
        )
        self._storage = StorageWatch(
            lambda: probe_root(settings.options.checkpoint_root, settings.options.root_identity), clock
        )
        self._managed: list[_Managed] = []
        self._by_name: dict[str, _Managed] = {}
        self._by_future: dict[Future[Any], _Managed] = {}
        self._by_slot: dict[str, _Managed] = {}
        """Slot -> the training that was last started there."""
        self._numbers = count(1)
        self._machine_nodes: tuple[int | None, Mapping[str, int]] = (None, {})
        self._curves = CurveLearning({kind: slots.speed for kind, slots in registry.kinds.items() if kind})
        self._keeper = CurveKeeper(settings.options.checkpoint_root)
        self.rendezvous = RendezvousServer(send)
        self._cohorts = CohortManager(
            settings,
            registry=registry,
            runner=self._runner,
            storage=self._storage,
            train_alone=self._train_alone,
            curves=self._curves,
            numbers=self._numbers,
            clock=clock,
        )

    @property
    def gathers(self) -> bool:
        """Whether there are trainings that the planner does not know yet."""
        return self._cohorts.gathers

    # Requests of the user, the planner and the control loop.

    def submit(self, training: Training) -> None:
        """Add a new training, which waits for nodes."""
        request = training.request
        self._runner.log(record.TrainingSubmitted(training.name, request.min_nodes, request.max_nodes, request.samples))
        if not self._cohorts.submit(training):
            self._train_alone(training)

    def _train_alone(self, training: Training) -> None:
        settings = self._settings
        machine = TrainingMachine(training.request, settings.limits, settings.costs, self._numbers, self._clock())
        managed = _Managed(training, machine)
        self._managed.append(managed)
        self._by_name[training.name] = self._by_future[training.future] = managed
        self._curves.recall(training.name, training.rates)
        self._carry_out(managed, machine.submit())
        self._compare_with_machine(managed)

    def machine_has(self, nodes: int | None, by_kind: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set the total number of nodes, if known, and that of each kind; trainings that need more fail."""
        if (nodes, by_kind) == self._machine_nodes:
            return
        self._machine_nodes = (nodes, dict(by_kind))
        for managed in self._managed:
            self._compare_with_machine(managed)

    def _compare_with_machine(self, managed: _Managed) -> None:
        nodes, by_kind = self._machine_nodes
        if nodes is not None:
            kinds = managed.training.request.node_kinds or by_kind
            most = max((by_kind[kind] for kind in kinds if kind in by_kind), default=nodes)
            self._handle(managed, on.MachineSized(most))

    def cancel(self, future: Future[Any]) -> None:
        """End a training with a checkpoint, if it is not over, and take its nodes away."""
        self._cohorts.cancel(future)
        if (managed := self._by_future.get(future)) is not None:
            self._handle(managed, on.Cancelled())

    def assign(self, name: str, nodes: frozenset[str]) -> None:
        """Set the nodes on which a training, or a cohort, should run."""
        self._cohorts.assign(name, nodes)
        if (managed := self._by_name.get(name)) is not None:
            self._handle(managed, on.Assigned(nodes))

    def fail_waiting(self, error: Exception) -> None:
        """Fail the trainings that are not running and have no nodes assigned."""
        self._cohorts.fail_waiting(error)
        for managed in self._managed:
            if not (managed.machine.participants or managed.machine.desired):
                self._handle(managed, on.Failed(unshared(error)))

    def fail_all(self, error: Exception) -> None:
        """Fail every training."""
        self._cohorts.fail_all(error)
        for managed in self._managed:
            self._handle(managed, on.Failed(unshared(error)))

    def close(self) -> None:
        """Keep what was learned of the scaling curves: the run is over."""
        self._keeper.close()

    def advance(self) -> None:
        """Advance every training one step towards its assignment."""
        self._watch_storage()
        self._cohorts.advance()
        now = self._clock()
        for managed in [one for one in self._managed if one.look_at <= now]:
            group = managed.machine.next_group
            key = None if group is None else self._store(managed, group.number)
            self._handle(managed, on.TimePassed(frozenset() if key is None else self.rendezvous.arrived(key)))
            if managed.machine.waits_for_nodes:
                managed.look_at = now + self._LOOK
        if gone := [one for one in self._managed if one.look_at <= now and one.gone]:
            self._forget(gone)

    def _forget(self, gone: Collection[_Managed]) -> None:
        for managed in gone:
            self._by_future.pop(managed.training.future, None)
            if self._by_name.get(managed.machine.name) is managed:  # else there is another one of this name by now
                del self._by_name[managed.machine.name]
        self._by_slot = {slot: one for slot, one in self._by_slot.items() if not one.gone}
        numbers = {id(one) for one in gone}
        self._managed = [one for one in self._managed if id(one) not in numbers]

    # Messages from slots. A slot's messages arrive in order, and it has one assignment at a time.

    def on_report(self, slot: Slot, message: RunReport) -> None:
        """Handle a report of a run."""
        if self._cohorts.on_message(slot, message):
            return
        if (managed := self._of(slot.name)) is not None:
            self._handle(managed, on.Reported(slot.name, message.run, message.report))
            if isinstance(message.report, Progress) and managed.machine.progress is message.report:
                self._learn(managed, message.report)

    def on_run_ended(self, slot: Slot, message: RunEnded) -> None:
        """Handle the end of a run."""
        if self._cohorts.on_message(slot, message):
            return
        if (managed := self._of(slot.name)) is not None:
            over = on.RunOver(slot.name, message.run, message.end, message.payload, message.stored)
            self._handle(managed, over)

    def on_member_message(self, slot: Slot, message: MemberReport | MemberEnded) -> None:
        """Handle a message about a member of an array."""
        self._cohorts.on_message(slot, message)

    def on_heartbeat(self, slot: Slot, waited: float) -> None:
        """Record how long a member has been waiting for the others."""
        if (managed := self._of(slot.name)) is not None:
            self._handle(managed, on.Heartbeat(slot.name, waited))

    def on_store_request(self, slot: Slot, message: StoreRequest) -> None:
        """Answer a call to a rendezvous store of the training that the slot runs."""
        managed = self._of(slot.name)
        own = managed is not None and message.group.rpartition("/")[0] == managed.machine.name
        self.rendezvous.handle(slot.name, message, self._clock(), own=own)

    def on_lost(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Handle the failure of a slot; a `crash` is a failure that the batch system did not cause."""
        if self._cohorts.on_lost(slot, reason, crash=crash):
            return
        if (managed := self._of(slot.name)) is not None:
            self._handle(managed, on.SlotLost(slot.name, reason, crash))

    def run_of(self, slot: Slot) -> int | None:
        """Return the number of a slot's current run."""
        managed = self._of(slot.name)
        return self._cohorts.runs_in(slot) if managed is None else managed.machine.participants[slot.name].run

    def _learn(self, managed: _Managed, progress: Progress) -> None:
        """Add a report of a group that trains undisturbed to the training's curve; change its batch if that pays."""
        if isinstance(phase := managed.machine.phase, Running):
            group = phase.group
            kinds = self._registry.kinds_on(group.nodes)
            if len(kinds) != 1:
                return  # between two kinds
            kind = kinds.pop()
            changed = self._curves.observe(
                self._clock(),
                managed.machine.name,
                group=group.number,
                nodes=len(group.nodes),
                slots=len(group.ranks),
                progress=progress,
                kind=kind,
            )
            for learned in changed:
                self._inform(learned)
            key = managed.training.curve_key
            if key and changed and (rates := self._curves.measured(managed.machine.name)):
                self._keeper.keep(key, rates)
            size = self._curves.next_batch(managed.machine.name, len(group.nodes), kind)
            if size is not None:
                self._handle(managed, on.BatchChosen(size))

    # Events and commands.

    def _of(self, slot: str) -> _Managed | None:
        managed = self._by_slot.get(slot)
        return managed if managed is not None and slot in managed.machine.participants else None

    def _handle(self, managed: _Managed, event: Event) -> None:
        managed.look_at = 0.0
        self._carry_out(managed, managed.machine.handle(event, self._registry, self._clock()))

    def _carry_out(self, managed: _Managed, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case do.OpenStore(group):
                    self.rendezvous.open(self._store(managed, group))
                case do.CloseStore(group):
                    self.rendezvous.close(self._store(managed, group))
                case do.AwaitStorage(condition):
                    until = self._storage.hold(managed.machine.name)
                    self._handle(managed, on.StoragePostponed(condition, until))
                case do.ForgetStorage():
                    self._storage.drop(managed.machine.name)
                case do.Inform(event):
                    self._inform(self._curves.completed(event))
                case _:
                    if isinstance(command, do.Start):
                        self._by_slot[command.slot] = managed
                    self._runner.run(managed.machine.name, managed.training, command)

    @staticmethod
    def _store(managed: _Managed, group: int) -> str:
        return f"{managed.machine.name}/{group}"

    def _watch_storage(self) -> None:
        """Let the trainings that wait for the checkpoint directory retry once it can be used."""
        ready, postponed = self._storage.turn()
        self._cohorts.on_storage(ready, postponed)
        if not (ready or postponed):
            return
        for managed in self._managed:
            if managed.machine.name in postponed:
                condition, until = postponed[managed.machine.name]
                self._handle(managed, on.StoragePostponed(condition, until))
            elif managed.machine.name in ready:
                self._handle(managed, on.StorageBack())
