"""Scaling curves of running trainings, learned from the throughput that they report at each number of nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.learning import Profile

if TYPE_CHECKING:
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import Trainer
    from freetrain_parsl.protocol.reports import Progress

__all__ = ["CurveLearning"]

_SIGNIFICANT = 0.05  # relative change of a rate below which the planner keeps the curve that it has


@dataclass
class _Stretch:
    """The last report of a group of constant size."""

    group: int
    samples: int
    slot_seconds: float


class _Learned:
    """What is known about one training."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.profile = Profile(trainer.curve)
        self.curve = trainer.curve
        self.last: _Stretch | None = None

    def described(self) -> Trainer:
        """Return the training with the curve that the planner knows."""
        return replace(self.trainer, curve=self.curve)


class CurveLearning:
    """Puts measured scaling curves into the descriptions of trainings on their way to the planner. Pure."""

    def __init__(self) -> None:
        self._learned: dict[str, _Learned] = {}

    def completed(self, event: planner.Event) -> planner.Event:
        """Return an event about a training with the curve measured so far."""
        match event:
            case planner.TrainerSubmitted(trainer=trainer) | planner.TrainerLearned(trainer=trainer):
                known = self._learned.setdefault(trainer.name, _Learned(trainer))
                known.trainer = trainer
                return replace(event, trainer=known.described())
            case planner.TrainerProgressed(trainer=name, work_left=left) if name in self._learned:
                self._learned[name].trainer = replace(self._learned[name].trainer, work_left=left)
            case planner.TrainerFinished(trainer=name) | planner.TrainerFailed(trainer=name):
                self._learned.pop(name, None)
        return event

    def observe(
        self, now: float, name: str, *, group: int, nodes: int, slots: int, progress: Progress
    ) -> planner.TrainerLearned | None:
        """Take a progress report; return what the planner should know if the curve has changed significantly.

        Parameters
        ----------
        now
            Seconds.
        name
            The training.
        group
            Number of its group. A period in which the group changed is not measured.
        nodes, slots
            Size of the group.
        progress
            The report; the time of its steps is measured where they are made, without checkpoints and changes.
        """
        known = self._learned.get(name)
        if known is None:
            return None
        last, known.last = known.last, _Stretch(group, progress.samples, progress.slot_seconds)
        if last is None or last.group != group:
            return None
        samples, seconds = progress.samples - last.samples, (progress.slot_seconds - last.slot_seconds) / slots
        if samples <= 0 or seconds <= 0:
            return None
        known.profile.observe(nodes, samples, seconds)
        if not _differ(known.curve, known.profile.curve):
            return None
        known.curve = known.profile.curve
        return planner.TrainerLearned(now, known.described())


def _differ(known: ScalingCurve, now: ScalingCurve) -> bool:
    before, after = dict(known.points), dict(now.points)
    if known.relative != now.relative or before.keys() != after.keys():
        return True
    return any(abs(after[nodes] - rate) > _SIGNIFICANT * rate for nodes, rate in before.items())
