"""The conductor: moves each training from the slots where it runs to the nodes where it should.

A training whose nodes change is paused at a step boundary; when all members of its generation have ended, it starts
on its new nodes as the next one. The same way leads out of a loss: the survivors end, and the next generation goes on
from the last checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import TooManyRestarts
from freetrain_parsl.executor.protocol import Message, error_in, settle_with_payload
from freetrain_parsl.executor.rendezvous import RendezvousDesk
from freetrain_parsl.executor.trainings import Generation, Training
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import RescaleCosts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.executor.roster import Roster, Slot

logger = logging.getLogger(__name__)

__all__ = ["Conductor", "TrainingSettings"]


@dataclass(frozen=True)
class TrainingSettings:
    """How trainings are treated that do not say otherwise; times in seconds.

    Parameters
    ----------
    checkpoint_root
        Where trainings keep their checkpoints; reachable from the nodes.
    checkpoint_interval, keep, save_margin
        See ``training.terms.SessionOptions``.
    costs
        Rescale costs of trainings that state none.
    threads
        Threads of each slot's torch; ``None``: torch's own choice.
    loss_timeout
        When a member is lost, the others must end within this time, or are lost too.
    collective_timeout
        Of torch's collectives and of rendezvous.
    max_crashes
        Slots that may die under a training, on nodes that nobody took, between two checkpoints.
    """

    checkpoint_root: Path
    checkpoint_interval: float = 60.0
    keep: int = 2
    save_margin: float = 2.0
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    threads: int | None = None
    loss_timeout: float = 10.0
    collective_timeout: float = 60.0
    max_crashes: int = 3


class Conductor:
    """Owned by the driver's thread.

    Parameters
    ----------
    settings
        See `TrainingSettings`.
    roster
        The slots.
    send
        Sends a message to a slot.
    kill
        Gives a slot up that does not end: (slot, reason).
    emit
        Takes events for the planner.
    journal
        Takes what happened.
    clock
        Seconds since the epoch.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        *,
        roster: Roster,
        send: Callable[[str, Message], object],
        kill: Callable[[Slot, str], None],
        emit: Callable[[ev.Event], None],
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._send = send
        self._kill = kill
        self._emit = emit
        self._journal = journal
        self._clock = clock
        self._trainings: dict[str, Training] = {}
        self._generations = 0
        self.rendezvous = RendezvousDesk(send)

    def submit(self, training: Training) -> None:
        """Take a new training; it waits for nodes."""
        now = self._clock()
        trainer = training.request.trainer(self._settings.costs, submitted=now)
        self._trainings[training.name] = training
        self._emit(ev.TrainerSubmitted(now, trainer))
        self._journal.write(
            now,
            "training_submitted",
            training.name,
            min_nodes=trainer.min_nodes,
            max_nodes=trainer.max_nodes,
            samples=training.request.samples,
        )

    def assign(self, name: str, nodes: frozenset[str]) -> None:
        """Note where a training should run from now on."""
        if (training := self._trainings.get(name)) is not None:
            training.desired = nodes

    def converge(self) -> None:
        """Move every training a step from where it runs to where it should."""
        for training in list(self._trainings.values()):
            if training.generation is not None:
                self._move(training, training.generation)
            elif training.crashes > self._settings.max_crashes:
                self._fail(
                    training,
                    TooManyRestarts(
                        f"training {training.name!r}: {training.crashes} of its processes died since its last "
                        f"checkpoint, though their nodes were not taken; the last: {training.last_crash}; "
                        "see the worker logs in the run directory"
                    ),
                )
            elif training.desired and not training.future.done():
                self._start(training)

    # What slots tell.

    def on_progress(self, message: Message) -> None:
        """Take a progress report of a first member."""
        training = self._trainings.get(message["trainer"])
        if training is None or training.generation is None:
            return
        if message["generation"] == training.generation.number:
            self._take_progress(training, message["progress"])

    def on_ended(self, slot: Slot, message: Message) -> None:
        """Note that a member has ended its fragment, one way or another."""
        slot.busy = None
        training = self._trainings.get(message["trainer"])
        generation = None if training is None else training.generation
        if training is None or generation is None or message["generation"] != generation.number:
            return
        outcome = message["outcome"]
        first = slot.name == generation.first
        if first and message.header.get("progress"):
            self._take_progress(training, message["progress"])
        if outcome == "failed":
            self._fail(training, error_in(message.payload))
        elif outcome == "finished" and first:
            self._finish(training, message.payload)
        self._end_member(training, generation, slot.name, lost=outcome in ("peer_lost", "failed"))

    def on_lost(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Note that a member's slot is gone; a `crash` is one that nobody outside caused."""
        training = self._trainings.get(slot.busy) if isinstance(slot.busy, str) else None
        if training is not None and training.generation is not None:
            if crash:
                training.crashes += 1
                training.last_crash = reason
            self._end_member(training, training.generation, slot.name, lost=True)

    def _take_progress(self, training: Training, progress: dict[str, Any]) -> None:
        now = self._clock()
        first_report = training.generation is not None and not training.generation.reported
        if first_report and training.generation is not None:
            training.generation.reported = True
            if progress["resumed_from"] is not None:
                self._journal.write(now, "fragment_resumed", training.name, step=progress["resumed_from"])
        if training.take(progress):
            self._journal.write(now, "checkpoint", training.name, step=progress["checkpoint_step"])
        self._journal.keep_progress(now, training.name, progress)
        total = progress["samples_total"] or training.request.samples
        if total is not None:
            left = max(0.0, float(total) - progress["samples"])
            self._emit(ev.TrainerProgressed(now, training.name, left))

    # One training.

    def _move(self, training: Training, generation: Generation) -> None:
        """Pause a generation that should run elsewhere; give up members that outlive a loss."""
        failing = generation.failing_since
        if failing is not None and self._clock() - failing > self._settings.loss_timeout:
            for name in list(generation.running):
                self._kill(self._roster.slots[name], "its peers were lost and it did not end")
        elif generation.nodes != training.desired and not generation.pausing and failing is None:
            self._pause(training, generation)

    def _start(self, training: Training) -> None:
        """Start the next generation, if all slots of its nodes are there and free."""
        slots = self._roster.complete_slots(training.desired)
        if slots is None or any(slot.busy is not None or slot.leaving for slot in slots):
            return
        self._generations += 1
        names = [slot.name for slot in slots]
        training.generation = Generation(self._generations, training.desired, set(names), first=names[0])
        self.rendezvous.open(training.generation.key(training.name))
        interval = training.request.checkpoint_interval
        header = {
            "trainer": training.name,
            "generation": self._generations,
            "world_size": len(slots),
            "timeout": self._settings.collective_timeout,
            "checkpoint_root": str(self._settings.checkpoint_root),
            "checkpoint_interval": self._settings.checkpoint_interval if interval is None else interval.total_seconds(),
            "keep": self._settings.keep,
            "save_margin": self._settings.save_margin,
            "seed": training.request.seed,
            "threads": self._settings.threads,
            "epochs": training.request.epochs,
        }
        for rank, slot in enumerate(slots):
            slot.busy = training.name
            self._send(slot.name, Message("run", {**header, "rank": rank}, training.payload))
        self._journal.write(
            self._clock(),
            "fragment_started",
            training.name,
            generation=self._generations,
            nodes=sorted(training.desired),
        )

    def _pause(self, training: Training, generation: Generation) -> None:
        generation.pausing = True
        header = {"trainer": training.name, "generation": generation.number}
        for name in generation.running:
            self._send(name, Message("pause", header))

    def _end_member(self, training: Training, generation: Generation, slot: str, *, lost: bool) -> None:
        if not generation.end(slot):
            return
        if lost and generation.failing_since is None:
            generation.failing_since = self._clock()
        if generation.running:
            return
        self.rendezvous.drop(generation.key(training.name))
        self._journal.write(
            self._clock(),
            "fragment_ended",
            training.name,
            generation=generation.number,
            nodes=sorted(generation.nodes),
            lost=generation.failing_since is not None,
        )
        training.generation = None
        if training.future.done():
            self._forget(training)

    def _finish(self, training: Training, payload: bytes) -> None:
        now = self._clock()
        self._emit(ev.TrainerFinished(now, training.name))
        self._journal.write(now, "training_finished", training.name)
        self._journal.commit()  # before anybody who waits for the future looks into it
        settle_with_payload(training.future, payload)

    def _fail(self, training: Training, error: BaseException) -> None:
        if training.future.done():
            return
        now = self._clock()
        self._emit(ev.TrainerFailed(now, training.name))
        self._journal.write(now, "training_failed", training.name, error=f"{type(error).__name__}: {error}")
        self._journal.commit()
        training.future.set_exception(error)
        if training.generation is None:
            self._forget(training)
        else:
            self._pause(training, training.generation)

    def _forget(self, training: Training) -> None:
        """Drop a training that is over, unless another of its name has been submitted since."""
        if self._trainings.get(training.name) is training:
            del self._trainings[training.name]
