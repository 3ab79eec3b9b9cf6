"""The same replay with lower and higher costs of changes: the effect of faster rescaling or slower starts on U."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.simulation import Cost, ReplaySettings, replay
from freetrain_parsl.interpreters import in_root_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from freetrain_parsl.extensions.replay.holes import HoleLog
    from freetrain_parsl.planning.policies import Policy

__all__ = ["RESCALE_FACTORS", "START_SECONDS", "Case", "what_if"]

RESCALE_FACTORS = (0.1, 0.5, 1.0, 2.0)
"""Factors on each trainer's rescale costs."""
START_SECONDS = (0.0, 30.0, 60.0, 120.0)
"""Costs of each start, seconds."""
_MOST_PROCESSES = 8  # each holds the log in memory


@dataclass(frozen=True)
class Case:
    """A replay to repeat.

    Parameters
    ----------
    log
        The holes.
    rates
        The trainers and the value of their samples.
    make_policy
        Makes the policy; must be picklable.
    settings
        How to replay, except for the cost of a start.
    """

    log: HoleLog
    rates: BestRates
    make_policy: Callable[[], Policy]
    settings: ReplaySettings

    def value(self, factor: float, start: float) -> float:
        """Return the value reached if rescales cost `factor` times as much and each start `start` seconds."""
        trainers = [
            replace(
                item, costs=replace(item.costs, up=factor * item.costs.up, down=factor * item.costs.down, start=start)
            )
            for item in self.rates.trainers
        ]
        settings = replace(self.settings, cost=Cost.FULL if start else Cost.PAPER, start_seconds=start)
        return replay(
            self.log, BestRates(trainers, self.rates.objective, self.rates.kinds), self.make_policy(), settings
        ).value


def what_if(
    case: Case,
    dedicated: float,
    *,
    processes: int | None = None,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> dict[str, Any]:
    """Repeat a replay for every pair of `RESCALE_FACTORS` and `START_SECONDS`, in parallel processes.

    Parameters
    ----------
    case
        The replay.
    dedicated
        Value on the dedicated nodes, where changes are free.
    processes
        Number of processes; ``None`` for one per available core, at most eight. With 1 it runs in this process.
    on_progress
        Called with the completed share.

    Returns
    -------
    dict
        ``rescale_factors``, ``start_seconds`` and ``efficiency``: a list for each factor with U for each start;
        ``None`` if the trainers cannot run on the dedicated nodes.
    """
    pairs = [(factor, start) for factor in RESCALE_FACTORS for start in START_SECONDS]
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    values: dict[tuple[float, float], float] = {}
    on_progress(0.0)
    results = _in_parallel(case, pairs, processes) if processes > 1 else _one_by_one(case, pairs)
    for pair, value in results:
        values[pair] = value
        on_progress(len(values) / len(pairs))
    return {
        "rescale_factors": list(RESCALE_FACTORS),
        "start_seconds": list(START_SECONDS),
        "efficiency": [
            [values[factor, start] / dedicated if dedicated else None for start in START_SECONDS]
            for factor in RESCALE_FACTORS
        ],
    }


_Pair = tuple[float, float]


def _one_by_one(case: Case, pairs: list[_Pair]) -> Iterator[tuple[_Pair, float]]:
    for pair in pairs:
        yield pair, case.value(*pair)


def _in_parallel(case: Case, pairs: list[_Pair], processes: int) -> Iterator[tuple[_Pair, float]]:
    # Not by fork: the solver's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(min(processes, len(pairs)), context, _begin, (case,)) as pool,
        _ended_at_an_error(),  # before the pool waits for them
    ):
        with _interruptions_wait(), in_root_directory():
            futures = {pool.submit(_value, *pair): pair for pair in pairs}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def _interruptions_wait() -> Iterator[None]:
    """Block Ctrl-C; processes started meanwhile block it until `_begin`, so that their imports print no traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ended_at_an_error() -> Iterator[None]:
    """On an error or Ctrl-C, end the processes that were started meanwhile instead of waiting for them."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:  # re-raised below
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise


_case: Case | None = None


def _begin(case: Case) -> None:
    global _case  # noqa: PLW0603 - a process of the pool gets the log once, not with each task
    _case = case
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _value(factor: float, start: float) -> float:
    assert _case is not None
    return _case.value(factor, start)
