"""What becomes of trainings, told to the planner and to the journal, and what is learned from it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.experience import LossRate, are_news, learned_costs
from freetrain_parsl.planning import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.executor.trainings import Change, Generation, Training
    from freetrain_parsl.planning.model import RescaleCosts

logger = logging.getLogger(__name__)

__all__ = ["Chronicle"]


class Chronicle:
    """Owned by the driver's thread.

    Parameters
    ----------
    emit
        Takes events for the planner.
    journal
        Takes what happened.
    clock
        Seconds since the epoch.
    """

    def __init__(self, *, emit: Callable[[ev.Event], None], journal: Journal, clock: Callable[[], float]) -> None:
        self._emit = emit
        self._journal = journal
        self._clock = clock
        self.loss_rate = LossRate()

    def submitted(self, training: Training, costs: RescaleCosts) -> None:
        """Tell of a new training; `costs` are those of trainings that state none."""
        now = self._clock()
        training.trainer = trainer = training.request.trainer(costs, submitted=now)
        training.costs = trainer.costs
        self._emit(ev.TrainerSubmitted(now, trainer))
        self._journal.write(
            now,
            "training_submitted",
            training.name,
            min_nodes=trainer.min_nodes,
            max_nodes=trainer.max_nodes,
            samples=training.request.samples,
        )

    def began(self, training: Training, generation: Generation, *, in_place: bool, paused: float = 0.0) -> None:
        """Tell that a training goes on in a group: in place, after `paused` seconds, or in processes of its own."""
        self._journal.write(
            self._clock(),
            "fragment_started",
            training.name,
            generation=generation.number,
            nodes=sorted(generation.nodes),
            in_place=in_place,
            paused=paused,
        )

    def ended(self, training: Training, generation: Generation, until: float, *, lost: bool) -> None:
        """Tell that a group is no more since `until`, because it lost a member or not."""
        self.loss_rate.seconds += max(0.0, until - generation.began)
        self._journal.write(
            self._clock(),
            "fragment_ended",
            training.name,
            generation=generation.number,
            nodes=sorted(generation.nodes),
            lost=lost,
        )

    def changed(self, training: Training, change: Change) -> None:
        """Tell that a training's group has changed in place."""
        self.ended(training, change.before, change.after.began, lost=change.abort)
        self.began(training, change.after, in_place=True, paused=change.paused)
        if not change.abort and not change.waiting:
            self._learn(training, "up" if change.grows else "down", change.paused)

    def progressed(self, training: Training, generation: Generation | None, progress: dict[str, Any]) -> None:
        """Take a progress report."""
        now = self._clock()
        if generation is not None and not generation.reported:
            generation.reported = True
            self._learn(training, "start", now - generation.began)
            if progress["resumed_from"] is not None:
                self._journal.write(now, "fragment_resumed", training.name, step=progress["resumed_from"])
        if (note := progress.get("code_note", "")) and note != training.code_note:
            training.code_note = note
            logger.warning("training %s: %s", training.name, note)
            self._journal.write(now, "code_changed", training.name, note=note)
        self._note_storage(training, progress.get("storage_problem", ""), progress.get("next_save", 0.0))
        if training.take(progress):
            self._journal.write(now, "checkpoint", training.name, step=progress["checkpoint_step"])
        self._journal.keep_progress(now, training.name, progress)
        total = progress["samples_total"] or training.request.samples
        if total is not None:
            left = max(0.0, float(total) - progress["samples"])
            if training.trainer is not None:
                training.trainer = replace(training.trainer, work_left=left)
            self._emit(ev.TrainerProgressed(now, training.name, left))

    def withheld(self, training: Training, condition: str, until: float) -> None:
        """Tell that a training gets no nodes until the checkpoint directory, in this `condition`, can be used."""
        self._emit(ev.TrainerWithheld(self._clock(), training.name))
        self.waits(training, condition, until)

    def waits(self, training: Training, condition: str, until: float) -> None:
        """Tell why a training waits for the checkpoint directory, and when it will try again."""
        now = self._clock()
        if condition != training.storage_problem:
            logger.warning("training %s waits: %s, next attempt in %.0f s", training.name, condition, until - now)
        training.storage_problem = condition
        self._journal.write(now, "training_waits", training.name, reason=condition, until=until)

    def released(self, training: Training) -> None:
        """Tell that a training tries again."""
        now = self._clock()
        logger.info("training %s tries again: the checkpoint directory can be used", training.name)
        training.storage_problem = ""
        self._journal.write(now, "training_tries_again", training.name)
        assert training.trainer is not None, "it was submitted"
        self._emit(ev.TrainerSubmitted(now, training.trainer))

    def _note_storage(self, training: Training, condition: str, next_save: float) -> None:
        """Tell when a training that runs ceases, or begins again, to save."""
        if condition == training.storage_problem:
            return
        training.storage_problem = condition
        if condition:
            logger.warning("training %s cannot save: %s, next attempt in %.0f s", training.name, condition, next_save)
            self._journal.write(self._clock(), "saving_fails", training.name, reason=condition)
        else:
            logger.info("training %s saves again", training.name)
            self._journal.write(self._clock(), "saving_works", training.name)

    def stalled(self, training: Training, why: str) -> None:
        """Tell why a training does not get on, or, with an empty reason, that it does again."""
        if why:
            logger.warning("training %s %s", training.name, why)
        self._journal.write(self._clock(), "training_stalled", training.name, reason=why)

    def finished(self, training: Training) -> None:
        """Tell that a training is done; durably, before anybody who waits for its future looks into the journal."""
        now = self._clock()
        self._emit(ev.TrainerFinished(now, training.name))
        if not training.trained:
            logger.warning(
                "training %s: its result is that of an earlier run, whose checkpoint of step %d was complete: nothing "
                "was trained; to train again, give it another name or remove its checkpoints",
                training.name, training.furthest,
            )  # fmt: skip
        self._journal.write(now, "training_finished", training.name, trained=training.trained)
        self._journal.commit()

    def cancelled(self, training: Training) -> None:
        """Tell that a training was cancelled: it gets no nodes any more, and ends once its state is saved."""
        now = self._clock()
        self._emit(ev.TrainerFailed(now, training.name))
        self._journal.write(now, "training_cancelled", training.name)
        self._journal.commit()

    def failed(self, training: Training, error: BaseException) -> None:
        """Tell that a training ended with an error; as durably."""
        now = self._clock()
        self._emit(ev.TrainerFailed(now, training.name))
        self._journal.write(now, "training_failed", training.name, error=f"{type(error).__name__}: {error}")
        self._journal.commit()

    def _learn(self, training: Training, kind: str, seconds: float) -> None:
        """Tell the planner what a rescale costs, unless the user has, if that is news."""
        if training.request.costs is not None or training.trainer is None:
            return
        training.costs = learned_costs(training.costs, kind, seconds)
        if are_news(training.trainer.costs, training.costs):
            training.trainer = replace(training.trainer, costs=training.costs)
            self._emit(ev.TrainerLearned(self._clock(), training.trainer))
