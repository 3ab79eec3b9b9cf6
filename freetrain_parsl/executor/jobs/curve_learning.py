"""Scaling curves of running training jobs, learned from the throughput that they report at each number of nodes."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.likeness import SHARDED
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.elastic_batch import BatchRange, ElasticProfile, NoiseEstimate
from freetrain_parsl.planning.curves.learning import (
    Profile,
    as_learned,
    best_rate_per_node,
    learned_on_kinds,
    relative_speeds,
)
from freetrain_parsl.storage.measurements import measurement_path, write_measurement, write_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.sizes import AllowedCounts
    from freetrain_parsl.protocol.reports import BatchReport, Progress
    from freetrain_parsl.storage.measurements import Rates

__all__ = ["CurveKeeper", "CurveLearning"]

_SIGNIFICANT = 0.05  # relative change of a rate below which the planner keeps the curve that it has
_RECALLED_SECONDS = 10.0  # of training, for which rates that an earlier training job has measured count
_CONTRADICTION = 1.5  # ratio of a rate to the recalled one from which the earlier training job was not alike
_PAUSE = 10.0  # seconds between writes
_LAST_WRITE = 2.0  # seconds for which the end of the run waits for it


@dataclass
class _Stretch:
    """The last report of a group of constant size."""

    group: int
    samples: int
    slot_seconds: float
    step: int
    batch: int


class _Recalled:
    """Rates of an earlier training job, and this job's own measurements."""

    def __init__(self, rates: Mapping[int, float], prior: ScalingCurve) -> None:
        self._rates = rates
        self._seconds: dict[int, float] = {}
        self.own = Profile(prior)

    def contradicted(self, nodes: int, samples: float, seconds: float) -> bool:
        """Take a measurement; return whether this number of nodes contradicts the earlier job's rates."""
        self.own.observe(nodes, samples, seconds)
        self._seconds[nodes] = self._seconds.get(nodes, 0.0) + seconds
        if nodes not in self._rates or self._seconds[nodes] < _RECALLED_SECONDS:
            return False
        ratio = self.own.measured[nodes] / self._rates[nodes]
        return not 1 / _CONTRADICTION < ratio < _CONTRADICTION


class _Known:
    """The measurements of one training job, and its description as sent to the planner."""

    def __init__(self, trainer: PlannedJob, kinds: Iterable[str]) -> None:
        self.trainer = trainer
        usable = [kind for kind in kinds if trainer.may_use(kind)] or [""]
        self.profiles = {kind: Profile(self._prior(kind)) for kind in usable}
        self._recalled: dict[str, _Recalled] = {}  # by kind
        self.elastic: dict[str, ElasticProfile] = {}  # by kind, if its batch size is to be chosen
        self.batch = 0
        self.sent = trainer
        self.last: _Stretch | None = None

    def recall(self, rates: Rates) -> None:
        """Begin with the rates of an earlier training job."""
        for kind, some in rates.items():
            if kind in self.profiles:
                self._recalled[kind] = _Recalled(some, self._prior(kind))
                for nodes, rate in some.items():
                    self.profiles[kind].observe(nodes, rate * _RECALLED_SECONDS, _RECALLED_SECONDS)

    def observe(self, kind: str, nodes: int, samples: float, seconds: float) -> None:
        """Take a measurement. If it contradicts the earlier job's rates, forget all of them for this kind of node.

        Rates on other numbers of nodes might never be measured again: a size that looks slow is not chosen.
        """
        recalled = self._recalled.get(kind)
        if recalled is not None and recalled.contradicted(nodes, samples, seconds):
            self.profiles[kind] = self._recalled.pop(kind).own
        else:
            self.profiles[kind].observe(nodes, samples, seconds)

    def _prior(self, kind: str) -> ScalingCurve:
        return self.trainer.curves.get(kind, self.trainer.curve)

    @property
    def known(self) -> bool:
        """Whether its rates are known, on any kind of node."""
        return any(profile.known for profile in self.profiles.values())

    def described(self) -> PlannedJob:
        """Return the training job with the curves and the limit that the planner has."""
        sent, left = self.sent, self.work(self.trainer.work_left)
        return replace(self.trainer, curve=sent.curve, max_nodes=sent.max_nodes, curves=sent.curves, work_left=left)

    def with_goodput(self, trainer: PlannedJob) -> PlannedJob:
        """Replace learned curves by goodput curves, where the effect of the batch size is known."""
        measured = ((kind, one.curve(trainer.max_nodes)) for kind, one in self.elastic.items())
        found = {kind: curve for kind, curve in measured if curve is not None}
        if not found:
            return trainer
        if not trainer.curves:  # one kind of nodes
            return replace(trainer, curve=next(iter(found.values())))
        factor = self._efficiency()  # of the current batch, in which the other curves are
        curves = {kind: found.get(kind) or curve.scaled(factor) for kind, curve in trainer.curves.items()}
        fastest = next(kind for kind, curve in trainer.curves.items() if curve == trainer.curve)
        return replace(trainer, curve=curves[fastest], curves=curves)

    def work(self, samples: float) -> float:
        """Return samples at the current batch size in samples of the initial one, the unit of the curves."""
        known = any(one.curve(1) is not None for one in self.elastic.values())
        return samples * self._efficiency() if known and math.isfinite(samples) else samples

    def _efficiency(self) -> float:
        return next(iter(self.elastic.values())).efficiency(self.batch)  # the noise is the same on all kinds

    def take_batch(self, report: BatchReport) -> None:
        """Take a report about the batch."""
        limits = BatchRange(report.initial, report.least, report.most)
        if any(one.limits != limits for one in self.elastic.values()) or not self.elastic:
            self.elastic = {kind: ElasticProfile(limits) for kind in self.profiles}
        self.batch = report.size
        if report.square is not None and report.variance is not None:
            for one in self.elastic.values():
                one.noise = NoiseEstimate(report.square, report.variance)


class CurveLearning:
    """Puts measured scaling curves into the descriptions of training jobs on their way to the planner. Pure.

    The relative curve of a training job that has not been measured is scaled to the fastest other training job, so that
    it does not wait behind training jobs whose rates are known.

    Where there are several kinds of nodes, each has a curve of its own; see `curves.learning` for kinds on which
    a training job has not been measured.

    Parameters
    ----------
    speeds
        Kind of node -> its assumed speed relative to the others; empty where there is one kind only.
    units_per_node
        Slots of a node where training jobs share nodes, or 1.
    """

    def __init__(self, speeds: Mapping[str, float] = MappingProxyType({}), units_per_node: int = 1) -> None:
        self._speeds, self._units_per_node = speeds, units_per_node
        self._known: dict[str, _Known] = {}
        self._best: dict[str, float] = {}
        """The best rate per node of each job whose rates are not relative."""
        self._recalled: dict[str, Rates] = {}

    def completed(self, event: planner.Event, *, stated: bool = False) -> planner.Event:
        """Return an event about a job with the curve measured so far, unless the job states its curve itself."""
        match event:
            case planner.TrainerSubmitted(trainer=trainer) | planner.TrainerLearned(trainer=trainer) if stated:
                _note_rate(self._best, trainer.name, [trainer.curve])
            case planner.TrainerSubmitted(trainer=trainer) | planner.TrainerLearned(trainer=trainer):
                if trainer.name not in self._known:
                    self._known[trainer.name] = known = _Known(trainer, self._speeds)
                    known.recall(self._recalled.pop(trainer.name, {}))
                    self._note_best(known)
                    known.sent = self._learned(known, self.best_rate())
                known = self._known[trainer.name]
                restricted = known.trainer.allowed_counts != trainer.allowed_counts
                known.trainer = trainer
                if restricted:
                    known.sent = self._learned(known, self.best_rate())
                return replace(event, trainer=known.described())
            case planner.TrainerProgressed(trainer=name, work_left=left) if name in self._known:
                known = self._known[name]
                known.trainer = replace(known.trainer, work_left=left)
                return replace(event, work_left=known.work(left))
            case planner.TrainerFinished(trainer=name) | planner.TrainerFailed(trainer=name):
                self._known.pop(name, None)
                self._best.pop(name, None)
        return event

    def recall(self, name: str, rates: Rates) -> None:
        """Take the rates of an earlier, similar training job, before this one is submitted to the planner."""
        if rates:
            self._recalled[name] = rates

    def measured(self, name: str) -> Rates:
        """Return a training job's measured rates; none if its batch size changes, because they depend on it."""
        known = self._known.get(name)
        if known is None or known.elastic:
            return {}
        measured = {kind: one.measured for kind, one in known.profiles.items()}
        rates = {kind: {n: rate for n, rate in some.items() if rate > 0} for kind, some in measured.items()}
        return {kind: some for kind, some in rates.items() if some}

    def observe(
        self, now: float, name: str, *, group: int, nodes: int, slots: int, progress: Progress, kind: str = ""
    ) -> list[planner.TrainerLearned]:
        """Take a progress report; return an event for the planner if curves have changed significantly.

        Parameters
        ----------
        now
            Seconds.
        name
            The training job.
        group
            Number of its group. A period in which the group changed is not measured.
        nodes, slots
            Size of the group.
        progress
            The report; the time of its steps is measured where they are made, without checkpoints and changes.
        kind
            The kind of the nodes.
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
        known.observe(kind, nodes, samples, seconds)
        self._note_best(known)
        if known.elastic and progress.step > last.step:
            known.elastic[kind].times.observe(nodes, known.batch, progress.step - last.step, samples, seconds)
        unknown = [other for other in self._known.values() if not other.known]
        best = self.best_rate() if unknown else 1.0  # used for unknown training jobs only
        return [planner.TrainerLearned(now, one.described()) for one in (known, *unknown) if self._update(one, best)]

    def next_batch(self, name: str, nodes: int, kind: str = "") -> int | None:
        """Return the batch size that a training job should change to on its nodes; ``None``: it should not change."""
        known = self._known.get(name)
        if known is None or not known.elastic:
            return None
        size = known.elastic[kind].next_batch(nodes, known.batch)
        return None if size == known.batch else size

    def best_rate(self) -> float:
        """Return the largest rate per node that was measured, samples per second; 1 if there is none."""
        return max(self._best.values(), default=1.0)

    def _note_best(self, known: _Known) -> None:
        _note_rate(self._best, known.trainer.name, [profile.curve for profile in known.profiles.values()])

    def _learned(self, known: _Known, best_rate: float) -> PlannedJob:
        """Return a training job with the curves learned so far."""
        if not self._speeds:
            profile = known.profiles[""]
            return known.with_goodput(as_learned(known.trainer, profile, best_rate, self._units_per_node))
        others = [one.profiles for one in self._known.values()]
        speeds = relative_speeds(self._speeds, others)
        return known.with_goodput(learned_on_kinds(known.trainer, known.profiles, speeds, best_rate))

    def _update(self, known: _Known, best_rate: float) -> bool:
        """Return whether the planner should have other curves or another limit than it has."""
        now, sent = self._learned(known, best_rate), known.sent
        curves = [(sent.curve, now.curve)] + [(sent.curves[kind], now.curves[kind]) for kind in now.curves]
        if now.max_nodes == sent.max_nodes and not any(_differ(before, after) for before, after in curves):
            return False
        known.sent = now
        return True


def _note_rate(best: dict[str, float], name: str, curves: Sequence[ScalingCurve]) -> None:
    if any(not curve.relative for curve in curves):
        best[name] = best_rate_per_node(curves)
    else:
        best.pop(name, None)


def _differ(known: ScalingCurve, now: ScalingCurve) -> bool:
    before, after = dict(known.points), dict(now.points)
    if known.relative != now.relative or before.keys() != after.keys():
        return True
    return any(abs(after[nodes] - rate) > _SIGNIFICANT * rate for nodes, rate in before.items())


class CurveKeeper:
    """Keeps the newest curve of each key, and what its model allows.

    Parameters
    ----------
    root
        The checkpoint root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pending: dict[tuple[str, str], Callable[[], None]] = {}
        self._counts: dict[str, AllowedCounts] = {}  # as they were written
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, key: str, rates: Rates) -> None:
        """Write a curve soon; returns at once."""
        self._write_soon(("rates", key), partial(write_rates, self._root, key, rates))

    def keep_counts(self, key: str, allowed: AllowedCounts) -> None:
        """Write soon what the model of a sharded training job allows, in its units; returns at once."""
        if self._counts.get(key) != allowed:
            self._counts[key] = allowed
            path, content = measurement_path(self._root, SHARDED, key), [allowed.multiple_of, allowed.divisor_of]
            self._write_soon(("counts", key), partial(write_measurement, path, content))

    def _write_soon(self, what: tuple[str, str], write: Callable[[], None]) -> None:
        self._pending[what] = write
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="freetrain-curves", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the remaining curves, unless the directory hangs."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_LAST_WRITE)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait()
            self._write()
            self._ended.wait(_PAUSE)
        self._write()

    def _write(self) -> None:
        self._changed.clear()
        while self._pending:
            self._pending.popitem()[1]()
