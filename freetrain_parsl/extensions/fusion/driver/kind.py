"""The cohort manager: forms cohorts, translates messages into their events, and carries out their commands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from freetrain_parsl.errors import TrainingCancelled
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.jobs.training import commands as do
from freetrain_parsl.executor.jobs.training import events as on
from freetrain_parsl.extensions.fusion.driver.cohort import Cohort
from freetrain_parsl.extensions.fusion.driver.gathering import Gathering, cohort_key
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.driver.storage_watch import StorageWatch
    from freetrain_parsl.executor.jobs.command_runner import CommandRunner
    from freetrain_parsl.executor.jobs.curve_learning import CurveLearning
    from freetrain_parsl.executor.jobs.request import SharedSettings, Training
    from freetrain_parsl.executor.jobs.training.events import Event
    from freetrain_parsl.extensions.fusion.driver.gathering import CohortKey

__all__ = ["CohortManager"]

_ArrayMessage: TypeAlias = messages.RunReport | messages.RunEnded | messages.MemberReport | messages.MemberEnded


@dataclass
class _Managed:
    """A cohort with its trainings, by name."""

    key: CohortKey
    cohort: Cohort
    trainings: dict[str, Training] = field(default_factory=dict)


class CohortManager:
    """Manages the trainings that may run fused. Owned by the control loop's thread.

    Parameters
    ----------
    settings
        See `SharedSettings`.
    registry
        The slots.
    runner
        Carries out commands.
    storage
        Knows when the checkpoint directory can be used again.
    train_alone
        Manages a training that is not fused.
    curves
        The scaling curves of all trainings.
    numbers
        Yields numbers that are unique within the driver.
    clock
        Seconds since the epoch, never stepped.
    """

    def __init__(
        self,
        settings: SharedSettings,
        *,
        registry: SlotRegistry,
        runner: CommandRunner,
        storage: StorageWatch,
        train_alone: Callable[[Training], None],
        curves: CurveLearning,
        numbers: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._runner = runner
        self._storage = storage
        self._train_alone = train_alone
        self._curves = curves
        self._numbers = numbers
        self._clock = clock
        self._gathering = Gathering()
        self._managed: list[_Managed] = []
        self._by_future: dict[Future[Any], tuple[_Managed, str]] = {}
        """Future -> the cohort to which its training was added last, and its name."""
        self._refused: dict[CohortKey, str] = {}  # why trainings of these keys cannot be fused
        self._names = count(1)

    # Requests of the user, the planner and the control loop.

    @property
    def gathers(self) -> bool:
        """Whether there are trainings that the planner does not know yet."""
        return bool(self._gathering)

    def submit(self, training: Training) -> bool:
        """Take a new training if it may be fused; return false if it trains alone."""
        key = cohort_key(training.request)
        if key is None:
            return False
        if key in self._refused:
            self._runner.log(record.TrainsAlone(training.name, self._refused[key]))
            return False
        self._gathering.add(key, training, self._clock())
        return True

    def cancel(self, future: Future[Any]) -> bool:
        """End a training with a checkpoint; return whether it is one of these."""
        if (training := self._gathering.take(future)) is not None:
            self._runner.log(record.TrainingCancelled(training.name))
            error = TrainingCancelled(f"training {training.name!r} was cancelled")
            self._runner.run(training.name, training, do.Fail(error))
            return True
        managed, name = self._by_future.get(future, (None, ""))
        if managed is None or name not in managed.cohort or managed.trainings[name].future is not future:
            return False
        managed.cohort.cancel(name, self._clock())
        self._carry_out(managed)
        return True

    def assign(self, name: str, nodes: frozenset[str]) -> None:
        """Set the nodes of a cohort."""
        for managed in self._managed:
            if managed.cohort.name == name:
                self._handle(managed, on.Assigned(nodes))

    def fail_waiting(self, error: Exception) -> None:
        """Fail the trainings that are not running and have no nodes assigned."""
        self._fail_gathering(error)
        for managed in self._managed:
            if managed.cohort.idle:
                self._handle(managed, on.Failed(error))

    def fail_all(self, error: Exception) -> None:
        """Fail every training."""
        self._fail_gathering(error)
        for managed in list(self._managed):
            self._handle(managed, on.Failed(error))

    def advance(self) -> None:
        """Form cohorts, and advance each of them one step towards its assignment."""
        now = self._clock()
        for key, trainings in self._gathering.ready(now):
            self._form(key, trainings)
        for managed in list(self._managed):
            self._handle(managed, on.TimePassed())
        if any(one.cohort.ended for one in self._managed):
            self._managed = [one for one in self._managed if not one.cohort.ended]
            self._by_future = {each: one for each, one in self._by_future.items() if not one[0].cohort.ended}

    def on_storage(self, ready: Collection[str], postponed: Mapping[str, tuple[str, float]]) -> None:
        """Handle what the storage watch has found: names of cohorts that can retry, or must wait longer."""
        for managed in list(self._managed):
            name = managed.cohort.name
            if name in postponed:
                self._handle(managed, on.StoragePostponed(*postponed[name]))
            elif name in ready:
                self._handle(managed, on.StorageBack())

    # Messages from slots.

    def runs_in(self, slot: Slot) -> int | None:
        """Return the number of the array's run in a slot; ``None`` if there is none."""
        managed = self._of(slot)
        return None if managed is None else managed.cohort.runs[slot.name]

    def on_message(self, slot: Slot, message: _ArrayMessage) -> bool:
        """Handle a message of an array; return whether it is from one."""
        managed = self._of(slot)
        if managed is None:
            return False
        self._handle(managed, _event(slot.name, message))
        return True

    def on_lost(self, slot: Slot, reason: str, *, crash: bool) -> bool:
        """Handle the failure of a slot; return whether an array ran in it."""
        managed = self._of(slot)
        if managed is None:
            return False
        self._handle(managed, on.SlotLost(slot.name, reason, crash))
        return True

    # Cohorts.

    def _of(self, slot: Slot) -> _Managed | None:
        return next((managed for managed in self._managed if slot.name in managed.cohort.runs), None)

    def _form(self, key: CohortKey, trainings: list[Training]) -> None:
        """Add trainings to the cohort of their key, if there is one, or form one of at least two."""
        known = next((one for one in self._managed if one.key == key and not one.cohort.over), None)
        if known is not None:
            self._belong(known, trainings)
            known.cohort.add([training.request for training in trainings], self._clock())
            self._carry_out(known)
        elif key in self._refused or (len(trainings) == 1 and not key.structure):
            for training in trainings:
                self._train_alone(training)
        else:
            cohort = Cohort(
                f"cohort-{next(self._names)}",
                [training.request for training in trainings],
                limits=self._settings.limits,
                costs=self._settings.costs,
                slots_per_node=self._registry.slots_per_node,
                numbers=self._numbers,
                best_rate=self._curves.best_rate,
                structure=key.structure,
                now=self._clock(),
            )
            managed = _Managed(key, cohort)
            self._managed.append(managed)
            self._belong(managed, trainings)
            self._carry_out(managed)

    def _belong(self, managed: _Managed, trainings: Iterable[Training]) -> None:
        for training in trainings:
            managed.trainings[training.name] = training
            self._by_future[training.future] = managed, training.name

    def _fail_gathering(self, error: Exception) -> None:
        for training in self._gathering.take_all():
            self._runner.run(training.name, training, do.Fail(unshared(error)))

    def _handle(self, managed: _Managed, event: Event) -> None:
        managed.cohort.handle(event, self._registry, self._clock())
        self._carry_out(managed)

    def _carry_out(self, managed: _Managed) -> None:
        if managed.cohort.refusal:
            self._refused[managed.key] = managed.cohort.refusal
        for name, command in managed.cohort.take():
            training = None if name is None else managed.trainings[name]
            match command:
                case do.AwaitStorage(condition):
                    until = self._storage.hold(managed.cohort.name)
                    self._handle(managed, on.StoragePostponed(condition, until))
                case do.ForgetStorage():
                    self._storage.drop(managed.cohort.name)
                case do.Inform(event):
                    self._curves.take_stated(event)
                    self._runner.run(managed.cohort.name, None, command)
                case do.JoinCohort(structure):
                    assert training is not None
                    self._gathering.add(replace(managed.key, structure=structure), training, self._clock())
                case do.TrainAlone(reason):
                    assert training is not None
                    if reason:
                        self._runner.log(record.TrainsAlone(training.name, reason))
                    self._train_alone(training)
                case _:
                    self._runner.run(managed.cohort.name if name is None else name, training, command)


def _event(slot: str, message: _ArrayMessage) -> Event:
    match message:
        case messages.RunReport():
            return on.Reported(slot, message.run, message.report)
        case messages.RunEnded():
            return on.RunOver(slot, message.run, message.end, message.payload, message.stored)
        case messages.MemberReport():
            return on.MemberReported(slot, message.run, message.member, message.report)
        case messages.MemberEnded():
            return on.MemberOver(slot, message.run, message.member, message.end, message.payload, message.stored)
