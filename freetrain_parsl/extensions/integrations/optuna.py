"""Optuna: the trials of a study as training jobs, with pruning by what they pass to ``session.log``.

The driver asks the study for arguments, and submits a training job with them. What training jobs log reaches the driver
while they run; it is reported to the study, and a training job that the study's pruner gives up is cancelled. The
training function itself knows nothing of Optuna.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import queue
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.cluster.processes import is_running, process_info
from freetrain_parsl.errors import (
    BatchSystemError,
    CheckpointError,
    InvalidApp,
    InvalidSettings,
    PeerFailed,
    TrainingInterrupted,
)
from freetrain_parsl.executor.values.tracker import parse_row
from freetrain_parsl.settings_checks import check_count

try:
    from optuna.exceptions import TrialPruned
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError:
    raise ImportError("the package optuna is not installed: pip install 'freetrain-parsl[optuna]'") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from optuna.study import Study
    from parsl.dataflow.futures import AppFuture

    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.executor.executor import FreeTrainExecutor

logger = logging.getLogger(__name__)

__all__ = ["optimize"]

# Attributes of trials.
_DRIVER: Final = "freetrain:driver"
_TRAINING: Final = "freetrain:training"
_ERROR: Final = "freetrain:error"

_LONGEST_PREFIX: Final = 80  # characters of a study's name in those of its training jobs

# Errors that are not due to a trial: it continues in the next call.
_NOT_ITS_FAULT: Final = (BatchSystemError, CheckpointError, PeerFailed, TrainingInterrupted)


def optimize(
    study: Study,
    train: TrainingApp,
    suggest: Callable[[Trial], Mapping[str, Any]],
    *,
    n_trials: int,
    metric: str = "loss",
    n_jobs: int = 8,
    on_trial: Callable[[FrozenTrial], object] | None = None,
) -> None:
    """Run trials of a study as training jobs, and wait for them.

    Each trial is a training job of its own, which may be fused with others. After each epoch, its metric is reported to
    the study. If the study's pruner then gives the trial up, its training job is cancelled: it saves its state and
    leaves its nodes. A trial whose training job raises an exception fails, and the others continue.

    If the driver is interrupted or killed, the same call with the same study continues the trials that were running,
    from their checkpoints, provided that the study has a storage and the executor the same `checkpoint_dir`. One driver
    at a time may optimize a study.

    Parameters
    ----------
    study
        A study with one direction.
    train
        The training app. Its training jobs are named after the study, ``STUDY-NUMBER-…``, whatever the app's name is.
    suggest
        Takes a trial, and returns the arguments of its training job. Called in this thread; again for a trial that
        continues, which then has the values of the first time. May raise ``optuna.TrialPruned``.
    n_trials
        Trials of the whole study, including those of earlier calls.
    metric
        Name of the value to optimize: ``loss``, or one passed to ``session.log`` in each epoch. The last one is the
        trial's value. Values that are logged with ``every=`` do not count.
    n_jobs
        Maximum number of trials at a time.
    on_trial
        Called with each trial that is complete, pruned or failed.

    Raises
    ------
    InvalidApp
        The study has several directions or another driver, or a number is out of range. No trial was begun.
    TypeError
        The function does not accept the arguments that `suggest` returns.
    TrainingInterrupted, BatchSystemError, CheckpointError
        The run has failed, not a trial. The trials that were running continue in the next call.

    Examples
    --------
    >>> study = optuna.create_study(study_name="net", storage="sqlite:///net.db")  # doctest: +SKIP
    >>> optimize(study, train, lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1)}, n_trials=40)  # doctest: +SKIP
    """
    try:
        check_count("optimize: n_trials", n_trials)
        check_count("optimize: n_jobs", n_jobs)
    except InvalidSettings as error:
        raise InvalidApp(str(error)) from None
    if len(study.directions) > 1:
        raise InvalidApp(
            f"optimize: study {study.study_name!r} has {len(study.directions)} directions; Optuna prunes only studies "
            "with one"
        )
    _Optimization(study, train, suggest, metric, on_trial).run(n_trials, n_jobs)


@dataclass
class _Running:
    """A trial whose training job has been submitted."""

    trial: Trial
    training: str
    future: AppFuture
    reported: set[int] = field(default_factory=set)  # epochs
    value: float | None = None  # the last one


class _Optimization:
    def __init__(
        self,
        study: Study,
        train: TrainingApp,
        suggest: Callable[[Trial], Mapping[str, Any]],
        metric: str,
        on_trial: Callable[[FrozenTrial], object] | None,
    ) -> None:
        self._study = study
        self._train = train
        self._executor: FreeTrainExecutor = train.executor_of()
        self._suggest = suggest
        self._metric = metric
        self._on_trial = on_trial
        self._running: dict[int, _Running] = {}
        # Number of a trial, and the rows that it has logged; `None`: its future is done.
        self._events: queue.SimpleQueue[tuple[int, Sequence[str] | None]] = queue.SimpleQueue()

    def run(self, n_trials: int, n_jobs: int) -> None:
        waiting = list(_interrupted(self._study))
        try:
            while True:
                while len(self._running) < n_jobs and (waiting or self._begun < n_trials):
                    self._begin(waiting.pop(0) if waiting else self._study.ask())
                if not self._running:
                    return
                number, rows = self._events.get()
                if number in self._running:  # otherwise it has been pruned meanwhile
                    self._on_event(self._running[number], rows)
        finally:
            for one in self._running.values():
                self._executor.stop_observing(one.training)

    @property
    def _begun(self) -> int:
        """Trials of the study, without those that are only enqueued."""
        return sum(trial.state is not TrialState.WAITING for trial in self._study.get_trials(deepcopy=False))

    def _begin(self, trial: Trial) -> None:
        """Submit the training job of a trial."""
        trial.set_user_attr(_DRIVER, _own_identity())
        try:
            arguments = dict(self._suggest(trial))
            self._train.check_arguments(**arguments)
        except TrialPruned:
            self._tell(trial, TrialState.PRUNED)
            return
        except Exception:  # of the user's function: the trial has failed, and the error is theirs to see
            self._study.tell(trial, state=TrialState.FAIL)
            raise
        number = trial.number
        name = _name_of(self._study.study_name, trial)
        trial.set_user_attr(_TRAINING, name)
        self._executor.observe_values(name, lambda rows: self._events.put((number, rows)))
        future = self._train.options(name=name)(**arguments)
        reported = set(self._study.get_trials(deepcopy=False)[number].intermediate_values)
        self._running[number] = _Running(trial, name, future, reported)
        future.add_done_callback(lambda _future: self._events.put((number, None)))

    def _on_event(self, one: _Running, rows: Sequence[str] | None) -> None:
        if rows is None:
            self._end(one)
            return
        for epoch, value in _values_of(rows, self._metric):
            one.value = value
            if epoch in one.reported:  # in an earlier fragment, or by an earlier driver
                continue
            one.reported.add(epoch)
            one.trial.report(value, epoch)
            if one.trial.should_prune():
                self._executor.cancel(one.future)
                self._forget(one)
                self._tell(one.trial, TrialState.PRUNED)
                return

    def _end(self, one: _Running) -> None:
        """End a trial whose training job is done."""
        error = one.future.exception()
        if isinstance(error, _NOT_ITS_FAULT):
            raise error
        self._forget(one)
        if error is None and (one.value is None or math.isnan(one.value)):
            missing = f"was not logged: call session.log({self._metric}=…) in each epoch"
            why = missing if one.value is None else "is NaN"
            error = InvalidApp(f"training job {one.training}: the metric {self._metric!r} {why}")
        if error is None:
            self._tell(one.trial, TrialState.COMPLETE, one.value)
            return
        logger.warning("trial %d failed: %s: %s", one.trial.number, type(error).__name__, error)
        one.trial.set_user_attr(_ERROR, f"{type(error).__name__}: {error}")
        self._tell(one.trial, TrialState.FAIL)

    def _tell(self, trial: Trial, state: TrialState, value: float | None = None) -> None:
        told = self._study.tell(trial, value, state=state)
        if self._on_trial is not None:
            self._on_trial(told)

    def _forget(self, one: _Running) -> None:
        del self._running[one.trial.number]
        self._executor.stop_observing(one.training)


def _interrupted(study: Study) -> Iterator[Trial]:
    """Yield the trials that an earlier driver has begun and not ended.

    Raises
    ------
    InvalidApp
        That driver is alive.
    """
    for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        driver = frozen.user_attrs.get(_DRIVER)
        if driver is None:  # of somebody else's `study.optimize`
            continue
        host, pid, started = driver
        if host == platform.node() and driver != _own_identity() and is_running(pid, started):
            raise InvalidApp(
                f"optimize: process {pid} on this host is optimizing study {study.study_name!r}; wait for it, or end it"
            )
        yield Trial(study, frozen._trial_id)  # noqa: SLF001 - Optuna has no public way to continue with a trial


def _own_identity() -> list[Any]:
    """Return host, process id and start of this process, as JSON has them."""
    info = process_info(os.getpid())
    assert info is not None, "a process can inspect itself"
    return [platform.node(), info.pid, info.started]


def _name_of(study: str, trial: Trial) -> str:
    """Return the name of a trial's training, of no trial with other parameters: checkpoints are found by it."""
    identity = json.dumps([study, trial.number, trial.params], sort_keys=True, default=str)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', study)[:_LONGEST_PREFIX]}-{trial.number}-{digest}"


def _values_of(rows: Sequence[str], metric: str) -> Iterator[tuple[int, float]]:
    """Yield the epochs and values of a metric in logged rows; what a node sends may be anything."""
    for text in rows:
        row = parse_row(text)
        epoch = None if row is None else json.loads(text).get("epoch")
        if row is None or not isinstance(epoch, int) or epoch < 0:  # one of a single step has none
            continue
        value = row.values.get(metric)
        if isinstance(value, (int, float)):
            yield epoch, float(value)
