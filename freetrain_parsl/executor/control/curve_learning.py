"""Scaling curves of running trainings, learned from the throughput that they report at each number of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.elastic_batch import BatchRange, ElasticProfile, NoiseEstimate
from freetrain_parsl.planning.curves.learning import Profile, as_learned, best_rate_per_node

if TYPE_CHECKING:
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import Trainer
    from freetrain_parsl.protocol.reports import BatchReport, Progress

__all__ = ["CurveLearning"]

_SIGNIFICANT = 0.05  # relative change of a rate below which the planner keeps the curve that it has


@dataclass
class _Stretch:
    """The last report of a group of constant size."""

    group: int
    samples: int
    slot_seconds: float
    step: int
    batch: int


class _Known:
    """What is known about one training, and what was sent to the planner."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.profile = Profile(trainer.curve)
        self.elastic: ElasticProfile | None = None  # if its batch size is to be chosen
        self.batch = 0
        self.sent = trainer
        self.last: _Stretch | None = None

    def described(self) -> Trainer:
        """Return the training with the curve and the limit that the planner has."""
        left = self.work(self.trainer.work_left)
        return replace(self.trainer, curve=self.sent.curve, max_nodes=self.sent.max_nodes, work_left=left)

    def learned(self, best_rate: float) -> Trainer:
        """Return the training as measured so far; `best_rate` as for `as_learned`."""
        trainer = as_learned(self.trainer, self.profile, best_rate)
        curve = None if self.elastic is None else self.elastic.curve(trainer.max_nodes)
        return trainer if curve is None else replace(trainer, curve=curve)

    def work(self, samples: float) -> float:
        """Return samples at the current batch size in samples of the initial one, the unit of the curve."""
        if self.elastic is None or self.elastic.curve(1) is None or not math.isfinite(samples):
            return samples
        return samples * self.elastic.efficiency(self.batch)

    def take_batch(self, report: BatchReport) -> None:
        """Take what a report says of the batch."""
        limits = BatchRange(report.initial, report.least, report.most)
        if self.elastic is None or self.elastic.limits != limits:
            self.elastic = ElasticProfile(limits)
        self.batch = report.size
        if report.square is not None and report.variance is not None:
            self.elastic.noise = NoiseEstimate(report.square, report.variance)


class CurveLearning:
    """Puts measured scaling curves into the descriptions of trainings on their way to the planner. Pure.

    The relative curve of a training that has not been measured is scaled to the fastest other training, so that it does
    not wait behind trainings whose rates are known.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._stated: dict[str, ScalingCurve] = {}

    def completed(self, event: planner.Event) -> planner.Event:
        """Return an event about a training with the curve measured so far."""
        match event:
            case planner.TrainerSubmitted(trainer=trainer) | planner.TrainerLearned(trainer=trainer):
                if trainer.name not in self._known:
                    self._known[trainer.name] = known = _Known(trainer)
                    known.sent = as_learned(trainer, known.profile, self.best_rate())
                known = self._known[trainer.name]
                known.trainer = trainer
                return replace(event, trainer=known.described())
            case planner.TrainerProgressed(trainer=name, work_left=left) if name in self._known:
                known = self._known[name]
                known.trainer = replace(known.trainer, work_left=left)
                return replace(event, work_left=known.work(left))
            case planner.TrainerFinished(trainer=name) | planner.TrainerFailed(trainer=name):
                self._known.pop(name, None)
        return event

    def take_stated(self, event: planner.Event) -> None:
        """Take an event about a cohort, which measures its own curve."""
        match event:
            case planner.TrainerSubmitted(trainer=trainer) | planner.TrainerLearned(trainer=trainer):
                self._stated[trainer.name] = trainer.curve
            case planner.TrainerFinished(trainer=name):
                self._stated.pop(name, None)

    def observe(
        self, now: float, name: str, *, group: int, nodes: int, slots: int, progress: Progress
    ) -> list[planner.TrainerLearned]:
        """Take a progress report; return what the planner should know if curves have changed significantly.

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
        known = self._known.get(name)
        if known is None:
            return []
        if progress.batch is not None:
            known.take_batch(progress.batch)
        stretch = _Stretch(group, progress.samples, progress.slot_seconds, progress.step, known.batch)
        last, known.last = known.last, stretch
        if last is None or last.group != group or last.batch != known.batch:
            return []
        samples, seconds = progress.samples - last.samples, (progress.slot_seconds - last.slot_seconds) / slots
        if samples <= 0 or seconds <= 0:
            return []
        known.profile.observe(nodes, samples, seconds)
        if known.elastic is not None and progress.step > last.step:
            known.elastic.times.observe(nodes, known.batch, progress.step - last.step, samples, seconds)
        unknown = [other for other in self._known.values() if not other.profile.known]
        best = self.best_rate() if unknown else 1.0  # used for unknown trainings only
        return [planner.TrainerLearned(now, one.described()) for one in (known, *unknown) if self._update(one, best)]

    def next_batch(self, name: str, nodes: int) -> int | None:
        """Return the batch size that a training should change to on its nodes; ``None``: it should not change."""
        known = self._known.get(name)
        if known is None or known.elastic is None:
            return None
        size = known.elastic.next_batch(nodes, known.batch)
        return None if size == known.batch else size

    def best_rate(self) -> float:
        """Return the largest rate per node that was measured, samples per second; 1 if there is none."""
        measured = (known.profile.curve for known in self._known.values())
        return best_rate_per_node(chain(measured, self._stated.values()))

    @staticmethod
    def _update(known: _Known, best_rate: float) -> bool:
        """Return whether the planner should have another curve or limit than it has."""
        now = known.learned(best_rate)
        if now.max_nodes == known.sent.max_nodes and not _differ(known.sent.curve, now.curve):
            return False
        known.sent = now
        return True


def _differ(known: ScalingCurve, now: ScalingCurve) -> bool:
    before, after = dict(known.points), dict(now.points)
    if known.relative != now.relative or before.keys() != after.keys():
        return True
    return any(abs(after[nodes] - rate) > _SIGNIFICANT * rate for nodes, rate in before.items())
