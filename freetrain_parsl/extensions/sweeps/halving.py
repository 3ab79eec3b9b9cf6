"""Successive halving: all configurations train for a few epochs, and only the best of them continue.

K. Jamieson and A. Talwalkar: Non-stochastic best arm identification and hyperparameter optimization. AISTATS 2016.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from freetrain_parsl.errors import (
    BatchSystemError,
    CheckpointError,
    InvalidApp,
    InvalidSettings,
    PeerFailed,
    TrainingInterrupted,
)
from freetrain_parsl.settings_checks import check_count
from freetrain_parsl.sweep import SweepPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from parsl.dataflow.futures import AppFuture

    from freetrain_parsl.app import TrainingApp

__all__ = ["Evaluation", "HalvingResult", "Mode", "Rung", "is_usable", "promoted", "ranked", "successive_halving"]

Mode: TypeAlias = Literal["min", "max"]
"""Whether the best value is the smallest or the largest."""
# Errors that are not due to a configuration: to rank it last for one would be wrong.
_NOT_ITS_FAULT = (BatchSystemError, CheckpointError, PeerFailed, TrainingInterrupted)
_EPOCHS = "epochs"


def is_usable(value: float | None) -> bool:
    """Return whether a value can be compared: neither missing nor NaN."""
    return value is not None and not math.isnan(value)


def ranked(values: Sequence[float | None], mode: Mode) -> list[int]:
    """Return the positions of the values, best first.

    Equal values keep their order; missing values and NaN are last.

    Parameters
    ----------
    values
        The values; ``None`` for a missing one.
    mode
        Which of them is the best.
    """
    sign = 1.0 if mode == "min" else -1.0

    def rank(position: int) -> tuple[bool, float]:
        value = values[position]
        return (False, sign * value) if value is not None and is_usable(value) else (True, 0.0)

    return sorted(range(len(values)), key=rank)


def promoted(values: Sequence[float | None], mode: Mode, eta: int) -> list[int]:
    """Return the positions of the best ``1 / eta`` of the values, best first, but at least one.

    Missing values and NaN are never among them, so there may be fewer, or none.
    """
    keep = max(1, len(values) // eta)
    return [position for position in ranked(values, mode)[:keep] if is_usable(values[position])]


@dataclass(frozen=True)
class Evaluation:
    """One configuration in one rung.

    Parameters
    ----------
    configuration
        The arguments of its training job.
    value
        Its metric after the rung's epochs; ``None`` or NaN: it has failed.
    result
        What its function returned.
    error
        Why it has no value; ``None`` if it has one.
    """

    configuration: Mapping[str, Any]
    value: float | None
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Rung:
    """The configurations that were trained up to one number of epochs.

    Parameters
    ----------
    epochs
        The number of epochs, of the whole training job.
    evaluations
        The configurations, best first; those that failed are last.
    """

    epochs: int
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True)
class HalvingResult:
    """The result of a search.

    Parameters
    ----------
    rungs
        The rungs, in the order in which they were trained. The search ends early if all training jobs of a rung fail.
    """

    rungs: tuple[Rung, ...]

    @property
    def best_evaluation(self) -> Evaluation:
        """The best configuration of the last rung in which a training job succeeded."""
        firsts = [rung.evaluations[0] for rung in self.rungs]
        return next(first for first in reversed(firsts) if is_usable(first.value))

    @property
    def best(self) -> Mapping[str, Any]:
        """The best configuration."""
        return self.best_evaluation.configuration

    @property
    def value(self) -> float:
        """The metric of the best configuration."""
        value = self.best_evaluation.value
        assert value is not None, "it is usable"
        return value


def successive_halving(
    train: TrainingApp,
    configurations: Iterable[Mapping[str, Any]],
    *,
    epochs: Iterable[int] = (1, 3, 9),
    eta: int = 3,
    metric: str | Callable[[Any], float] = "loss",
    mode: Mode = "min",
    on_rung: Callable[[Rung], object] | None = None,
) -> HalvingResult:
    """Search the best configuration by successive halving, and wait for the result.

    All configurations train for ``epochs[0]`` epochs, the best ``1 / eta`` of them up to ``epochs[1]``, and so on. A
    configuration continues from its checkpoint. If the search is interrupted, the same call later trains only what is
    missing, provided that `checkpoint_dir` is the same.

    Parameters
    ----------
    train
        The training app. Its function calls ``session.epochs()`` without a number, or has a parameter ``epochs``, which
        this function sets. What it does in an epoch must not depend on the number of epochs.
    configurations
        The arguments of each training job.
    epochs
        Number of epochs, of the whole training job, that each rung reaches; increasing.
    eta
        Each rung but the last passes on the best ``1 / eta`` of its configurations, rounded down, but at least one.
    metric
        Name of the value that is compared, in the ``session.metrics`` that the function returns: ``loss``, or a value
        passed to ``session.log``, after the rung's last epoch. A function that returns another dictionary has the value
        there. Or a callable that takes what the function returned.
    mode
        ``"min"`` or ``"max"``: which value is the best.
    on_rung
        Called after each rung.

    Returns
    -------
    HalvingResult
        All rungs and the best configuration. A configuration whose training job fails, or whose value is missing or
        NaN, is ranked last in its rung, and not trained further.

    Raises
    ------
    InvalidApp
        The configurations or epochs are invalid; nothing is submitted.
    TypeError
        The function does not accept the arguments of a configuration.
    Exception
        All training jobs of the first rung have failed: the error of the first of them. Or a training job has failed
        for a reason other than its configuration: the batch system, the checkpoints, or the end of the run.

    Examples
    --------
    >>> result = successive_halving(train, [{"lr": 10**-x} for x in range(1, 10)])  # doctest: +SKIP
    >>> result.best, result.value  # doctest: +SKIP
    """
    counts = tuple(epochs)
    _check(counts, eta, mode)
    runs = _runs(train, [dict(configuration) for configuration in configurations], counts[-1])
    rungs: list[Rung] = []
    for count in counts:
        futures = [run.submit(count) for run in runs]
        evaluations = [_evaluated(run, future, count, metric) for run, future in zip(runs, futures, strict=True)]
        values = [evaluation.value for evaluation in evaluations]
        rungs.append(Rung(count, tuple(evaluations[position] for position in ranked(values, mode))))
        if len(rungs) == 1 and not any(map(is_usable, values)):
            raise next(evaluation.error for evaluation in evaluations if evaluation.error is not None)
        if on_rung is not None:
            on_rung(rungs[-1])
        runs = [runs[position] for position in promoted(values, mode, eta)]
        if not runs:
            break
    return HalvingResult(tuple(rungs))


@dataclass(frozen=True)
class _Run:
    """The training job of one configuration, under one name in all rungs."""

    app: TrainingApp
    configuration: Mapping[str, Any]
    takes_epochs: bool

    def submit(self, epochs: int) -> AppFuture:
        own = {_EPOCHS: epochs} if self.takes_epochs else {}
        return self.app.options(epochs=epochs)(**self.configuration, **own)


def _check(epochs: Sequence[int], eta: int, mode: str) -> None:
    if mode not in get_args(Mode):
        raise InvalidApp(f"successive_halving: mode must be 'min' or 'max', got {mode!r}")
    try:
        check_count("successive_halving: eta", eta, least=2)
        for count in epochs:
            check_count("successive_halving: each of epochs", count)
    except InvalidSettings as error:
        raise InvalidApp(str(error)) from None
    if not epochs or any(later <= earlier for earlier, later in itertools.pairwise(epochs)):
        raise InvalidApp(f"successive_halving: epochs must be increasing numbers such as (1, 3, 9), got {epochs!r}")


def _runs(train: TrainingApp, configurations: Sequence[dict[str, Any]], last: int) -> list[_Run]:
    """Return the training jobs, each with a name that does not depend on the rung; `last` is the last one's epochs."""
    if not configurations:
        raise InvalidApp(
            "successive_halving: there are no configurations; give the arguments of at least one training job"
        )
    for number, configuration in enumerate(configurations, start=1):
        if _EPOCHS in configuration:
            raise InvalidApp(
                f"successive_halving: configuration {number} has 'epochs', which the rungs set; give "
                "successive_halving(…, epochs=…) instead"
            )
    takes_epochs = _EPOCHS in inspect.signature(train.training_function).parameters
    own = {_EPOCHS: last} if takes_epochs else {}
    points = [SweepPoint(kwargs={**configuration, **own}) for configuration in configurations]
    apps = train.at_points(points, "successive_halving")
    if takes_epochs:  # the name may depend on this argument: in all rungs it is that of the last one
        code = apps[0].call_request((), points[0].kwargs, stage=()).options.code  # once; and names depend on no files
        apps = [
            app.options(name=app.call_request((), point.kwargs, code, stage=()).name)
            for app, point in zip(apps, points, strict=True)
        ]
    return [_Run(app, each, takes_epochs) for app, each in zip(apps, configurations, strict=True)]


def _evaluated(run: _Run, future: AppFuture, epochs: int, metric: str | Callable[[Any], float]) -> Evaluation:
    """Wait for a training job and return its value.

    Raises
    ------
    Exception
        It has failed for a reason other than its configuration.
    """
    error = future.exception()
    if isinstance(error, _NOT_ITS_FAULT):
        raise error
    if error is not None:
        return Evaluation(run.configuration, None, error=error)
    result = future.result()
    try:
        value = _value_of(result, epochs, metric)
    except Exception as problem:  # noqa: BLE001 - the user's callable may raise anything
        return Evaluation(run.configuration, None, result, problem)
    if not is_usable(value):
        return Evaluation(
            run.configuration, value, result, InvalidApp(f"successive_halving: the metric {metric!r} is NaN")
        )
    return Evaluation(run.configuration, value, result)


def _value_of(result: Any, epochs: int, metric: str | Callable[[Any], float]) -> float:
    """Return the metric after this many epochs; of a training job that is ahead, from its history."""
    if callable(metric):
        return float(metric(result))
    if not isinstance(result, Mapping):
        raise InvalidApp(
            f"successive_halving: the function returned {type(result).__name__}, in which there is no {metric!r}; "
            "return session.metrics, or give metric= a callable"
        )
    rows: list[Mapping[str, Any]] = result.get("history") or []
    row: Mapping[str, Any] = next((row for row in rows if row["epoch"] == epochs - 1), {})
    value = row.get(metric, result.get(metric))
    if value is None:
        known = ", ".join(dict.fromkeys([*result, *row]))
        raise InvalidApp(f"successive_halving: the result has no {metric!r}; it has: {known or 'nothing'}")
    return float(value)
