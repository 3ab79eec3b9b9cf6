"""Carrying out the commands of the state machines of trainings: messages to slots, records, futures."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from freetrain_parsl.errors import FreeTrainError, TrainingCancelled
from freetrain_parsl.executor.jobs.training import commands as do
from freetrain_parsl.executor.jobs.training.planner_view import FailureRate
from freetrain_parsl.executor.payloads.payloads import error_in, settle_with_error, settle_with_value
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import AddMember, StartArray, StartRun
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.driver.settler import Settle
    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.executor.jobs.request import SharedSettings, Training
    from freetrain_parsl.executor.jobs.training.commands import Command
    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.planning import events as planner
    from freetrain_parsl.protocol.messages import ToSlot
    from freetrain_parsl.protocol.options import SessionOptions

logger = logging.getLogger(__name__)

__all__ = ["CommandRunner"]


class CommandRunner:
    """Carries out commands. Owned by the control loop's thread.

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
    """

    def __init__(
        self,
        settings: SharedSettings,
        *,
        registry: SlotRegistry,
        send: Callable[[str, ToSlot], object],
        kill: Callable[[Slot, str], None],
        set_aside: Callable[[Slot, str], None],
        inform: Callable[[planner.Event], None],
        journal: Journal,
        clock: Callable[[], float],
        settle: Settle,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._send = send
        self._kill = kill
        self._set_aside = set_aside
        self._inform = inform
        self._journal = journal
        self._clock = clock
        self._settle = settle
        self._failure_rate = FailureRate()

    def run(self, name: str, training: Training | None, command: Command) -> None:
        """Carry out a command.

        Parameters
        ----------
        name
            Of the training, or of the trainings that run fused.
        training
            The training; ``None`` if the command concerns all that run fused.
        command
            The command; those about stores and the checkpoint directory are the caller's.
        """
        match command:
            case do.Start() | do.FormArray() | do.Add() | do.Send() | do.Release() | do.Kill() | do.SetAside():
                slot = self._registry.slots.get(command.slot)
                if slot is not None:  # else it was dropped by an earlier command
                    self._do_to_slot(name, training, slot, command)
            case do.CountRestart():
                self._failure_rate.failures += 1
            case do.Inform(event):
                self._inform(event)
            case do.KeepProgress(progress):
                self._journal.keep_progress(self._clock(), name, progress)
            case do.Log(entry):
                self.log(entry)
            case do.Resolve(payload, stored):
                assert training is not None
                self._journal.commit()  # before code that waits for the future reads the journal
                value = payload if stored is None else stored
                self._settle(partial(settle_with_value, training.future, value, self._settings.values))
            case do.Fail(error):
                assert training is not None
                self._fail(training, error_in(error) if isinstance(error, bytes) else error)

    def _do_to_slot(
        self,
        name: str,
        training: Training | None,
        slot: Slot,
        command: do.Start | do.FormArray | do.Add | do.Send | do.Release | do.Kill | do.SetAside,
    ) -> None:
        match command:
            case do.Start(run=run, place=place):
                assert training is not None
                slot.busy = name
                meeting = self._settings.limits.meeting_timeout
                options = self._options(training)
                self._send(slot.name, StartRun(name, run, options, place, meeting, training.payload))
            case do.FormArray(run=run, members=members, limit=limit, size=size):
                slot.busy = name
                self._send(slot.name, StartArray(name, run, members, limit, size))
            case do.Add(array=array, run=run):
                assert training is not None
                self._send(slot.name, AddMember(array, run, self._options(training), training.payload))
            case do.Send(message=message):
                self._send(slot.name, message)
            case do.Release():
                slot.busy = None
            case do.Kill(reason=reason):
                self._kill(slot, reason)
            case do.SetAside(reason=reason):
                self._set_aside(slot, reason)

    def _options(self, training: Training) -> SessionOptions:
        own = training.request.options
        shared = self._settings.options
        interval = own.checkpoint_interval
        return replace(
            own,
            checkpoint_root=shared.checkpoint_root,
            root_identity=shared.root_identity,
            checkpoint_interval=shared.checkpoint_interval if interval is None else interval,
            keep=shared.keep,
            save_margin=shared.save_margin,
            threads=shared.threads,
            mean_time_between_failures=timedelta(seconds=self._failure_rate.mean_time_between),
        )

    def _fail(self, training: Training, error: BaseException) -> None:
        if not isinstance(error, TrainingCancelled):  # recorded when it was requested
            final = not (isinstance(error, FreeTrainError) and error.resumable)
            self.log(record.TrainingFailed(training.name, f"{type(error).__name__}: {text_of(error)}", final))
        self._journal.commit()
        self._settle(partial(settle_with_error, training.future, error))

    def log(self, entry: record.Record) -> None:
        """Write a record to the journal, and to the log what a user should know."""
        self._journal.write(self._clock(), entry)
        name = entry.subject
        match entry:
            case record.FragmentEnded(seconds=seconds, array="") | record.ArrayEnded(seconds=seconds):
                self._failure_rate.seconds += seconds
            case record.ArrayMeasured(members=members, gain=gain):
                logger.info("%s: %d trainings fused are %.2f times as fast as one by one", name, members, gain)
            case record.TrainsAlone(reason=reason):
                logger.warning("training %s is not fused: %s", name, reason)
            case record.CohortStalled(reason=reason) | record.TrainingStalled(reason=reason) if reason:
                logger.warning("%s %s", name, reason)
            case record.BatchChanged(size=size, before=before):
                logger.info("training %s has batches of %d samples, before %d", name, size, before)
            case record.CodeChanged(note=note):
                logger.warning("training %s: %s", name, note)
            case record.TrainingWaits(reason=reason, until=until):
                logger.warning("training %s waits: %s, next attempt in %.0f s", name, reason, until - self._clock())
            case record.TrainingTriesAgain():
                logger.info("training %s tries again: the checkpoint directory can be used again", name)
            case record.SavingFails(reason=reason):
                logger.warning("training %s cannot save: %s", name, reason)
            case record.SavingWorks():
                logger.info("training %s saves again", name)
            case record.TrainingFinished(trained=False, step=step):
                logger.warning(
                    "training %s: its result is that of an earlier run, whose checkpoint of step %d was complete: "
                    "nothing was trained; to train again, give it another name or remove its checkpoints",
                    name,
                    step,
                )
