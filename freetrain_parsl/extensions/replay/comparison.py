"""Comparison of policies, and of costs of changes, on the same log and trainers, with all results in one dictionary."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from freetrain_parsl import __version__
from freetrain_parsl.extensions.replay.accelerators import (
    SlotLog,
    accelerator_figures,
    over_whole_nodes,
    per_node,
)
from freetrain_parsl.extensions.replay.holes import refuse_forecasts
from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.metrics import Yardstick, log_figures, policy_figures
from freetrain_parsl.extensions.replay.page.wording import best_first, count
from freetrain_parsl.extensions.replay.simulation import Cost, Knowledge, ReplaySettings, replay
from freetrain_parsl.interpreters import in_root_directory
from freetrain_parsl.planning import planner
from freetrain_parsl.planning.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.extensions.replay.accelerators import Accelerators
    from freetrain_parsl.extensions.replay.holes import HoleLog
    from freetrain_parsl.extensions.replay.trainers import TrainerSet
    from freetrain_parsl.planning.policies import Policy

__all__ = [
    "RESCALE_FACTORS",
    "START_SECONDS",
    "Case",
    "Contestant",
    "OnProgress",
    "compare",
    "entry_of",
    "progress_of",
    "refuse_missing_forecasts",
    "top_level",
    "what_if",
]

RESCALE_FACTORS = (0.1, 0.5, 1.0, 2.0)
"""Factors on each trainer's rescale costs."""
START_SECONDS = (0.0, 30.0, 60.0, 120.0)
"""Costs of each start, seconds."""
_MOST_PROCESSES = 8  # each holds the log in memory
OnProgress = Callable[[str, float], None]
"""(current activity, share of it that is done): called from time to time."""

_NOT_AT_TOP = ("trainers", "series", "solve_histogram")
"""Keys of a policy that are not copied to the top level of a result: they are long, or have another meaning there."""


@dataclass(frozen=True)
class Case:
    """A replay to repeat; `make_policy` must be picklable."""

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
        return replay(self.log, replace(self.rates, trainers=trainers), self.make_policy(), settings).value


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
    dedicated
        Value on the dedicated nodes, where changes are free.
    processes
        Number of processes; ``None`` for one per available core, at most eight. With 1 it runs in this process.

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


@dataclass(frozen=True)
class Contestant:
    """A policy by name, what it knows of closings and maximises, and its horizon in seconds (``None``: adaptive)."""

    policy: str
    knowledge: Knowledge = Knowledge.NONE
    objective: str = "speedup"
    horizon: float | None = None

    def make(self) -> Policy:
        """Make the policy.

        Raises
        ------
        InvalidSettings
            The policy rejects the objective or the horizon.
        """
        kind: Callable[..., Policy] = POLICIES[self.policy]
        return kind(self.objective, horizon=None if self.horizon is None else timedelta(seconds=self.horizon))


def compare(
    log: HoleLog,
    trainers: TrainerSet,
    contestants: Sequence[Contestant],
    settings: ReplaySettings | None = None,
    *,
    price_per_node_hour: float | None = None,
    accelerators: Accelerators | None = None,
    with_what_if: bool = False,
    on_progress: OnProgress = lambda _doing, _share: None,
) -> dict[str, Any]:
    """Replay a log for each policy.

    Parameters
    ----------
    trainers
        The trainers; their objective determines the value of samples, whatever the policies maximise.
    settings
        How to replay; `knowledge` is taken from each contestant.
    accelerators
        Of each node. The trainers are described over these, and U is relative to dedicated nodes that they share, also
        where the replay gives them whole nodes: so the gain of sharing is the difference of both.
    with_what_if
        Repeat the best attainable replay with other costs of rescales and starts; see `what_if`.

    Returns
    -------
    dict
        Plain values, as written by ``freetrain replay --json``. With a single contestant, most of its figures are also
        at the top level.

    Raises
    ------
    InvalidSettings
        Forecasts are requested from a log that has none.
    InvalidInput
        No node of the log is ever idle.
    """
    settings = settings or ReplaySettings()
    refuse_missing_forecasts(log, contestants)
    on_progress("oracle", 0.0)
    kinds = sorted(set(log.kinds.values()))
    units, rates, yardstick = _units(log, trainers, kinds, settings, accelerators)
    if accelerators is not None and accelerators.shared:
        settings = replace(settings, slots_per_node=accelerators.per_node)
    on_progress("oracle", 1.0)

    def run(one: Contestant) -> dict[str, Any]:
        report = progress_of(one, log, on_progress)
        outcome = replay(units, rates, one.make(), replace(settings, knowledge=one.knowledge), report)
        report(log.end)
        if accelerators is None:
            return policy_figures(outcome, yardstick, price_per_node_hour=price_per_node_hour)
        if accelerators.shared:
            per_node(outcome, accelerators.per_node)
        figures = policy_figures(outcome, yardstick, price_per_node_hour=price_per_node_hour)
        return {**figures, **accelerator_figures(outcome, trainers.trainers, accelerators)}

    entries = [entry_of(one, partial(run, one)) for one in contestants]
    more: dict[str, Any] = {}
    dedicated = yardstick.nodes
    if accelerators is not None:
        dedicated /= accelerators.per_node
        more["accelerators"] = {"per_node": accelerators.per_node, "shared": accelerators.shared}
    if with_what_if:
        best = contestants[entries.index(best_first(entries)[0])]
        case = Case(units, rates, best.make, replace(settings, knowledge=best.knowledge))
        progress = partial(on_progress, "what if changes cost less or more")
        more["what_if"] = what_if(case, yardstick.dedicated, on_progress=progress)
    return {
        "version": __version__,
        "log": log_figures(log),
        "trainers": {"spec": trainers.name, "count": len(trainers.trainers), "objective": trainers.objective},
        "notes": _notes(
            trainers, yardstick.nodes, settings.concurrent, "nodes" if accelerators is None else "accelerators"
        ),
        "dedicated_nodes": dedicated,
        "idle_by_kind": log.mean_idle_by_kind() if kinds else {},
        "cost": settings.cost.value,
        "curves": settings.curves.value,
        "concurrent": settings.concurrent,
        "blocks_start_in": None if settings.blocks is None else settings.blocks.planner.startup.total_seconds(),
        "nodes_per_block": None if settings.blocks is None else settings.blocks.planner.max_nodes_per_block,
        **top_level(entries),
        "policies": entries,
        **more,
    }


def _units(
    log: HoleLog,
    trainers: TrainerSet,
    kinds: list[str],
    settings: ReplaySettings,
    accelerators: Accelerators | None,
) -> tuple[HoleLog, BestRates, Yardstick]:
    """Return the log and the trainers in units of the replay, and the reference values."""
    if accelerators is None:
        rates = BestRates(trainers.trainers, trainers.worth, kinds or [""])
        return log, rates, Yardstick.of(rates, log, concurrent=settings.concurrent)
    each = accelerators.per_node
    slots = SlotLog(log, each)
    rates = BestRates(trainers.trainers, trainers.worth, slots_per_node=each)
    yardstick = Yardstick.of(rates, slots, concurrent=settings.concurrent)
    if accelerators.shared:
        return slots, rates, yardstick
    whole = [over_whole_nodes(trainer, each) for trainer in trainers.trainers]
    return log, BestRates(whole, trainers.worth), yardstick


def entry_of(contestant: Contestant, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a contestant's entry: its settings, the figures that `run` returns, and why a decision was refused."""
    with _first_refusal() as refusal:
        figures = run()
    return {
        "policy": contestant.policy,
        "knowledge": contestant.knowledge.value,
        "objective": contestant.objective,
        "horizon": "adaptive" if contestant.horizon is None else contestant.horizon,
        **figures,
        "first_refusal": refusal.reason,
    }


def top_level(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a single policy that are also at the top level of a result."""
    return {key: value for key, value in entries[0].items() if key not in _NOT_AT_TOP} if len(entries) == 1 else {}


def refuse_missing_forecasts(log: HoleLog, contestants: Sequence[Contestant]) -> None:
    """Raise `InvalidSettings` if a contestant needs forecasts and the log has none."""
    if not log.has_forecasts and any(one.knowledge is Knowledge.ESTIMATED for one in contestants):
        raise refuse_forecasts(log.name)


def _notes(trainers: TrainerSet, mean_idle: float, concurrent: int | None, units: str) -> list[str]:
    """Describe what limits the result, and the remedy; sizes are numbers of `units`."""
    sizes = sorted((trainer.max_nodes for trainer in trainers.trainers), reverse=True)[:concurrent]
    if sum(sizes) >= mean_idle:
        return []
    several = f"{len(sizes)} trainers" if len(sizes) > 1 else "one trainer"
    each = f" of at most {count(sizes[0])} {units}" if len(sizes) > 1 and sizes[0] == sizes[-1] else ""
    at_once = " at a time" if concurrent is not None and concurrent < len(trainers.trainers) else ""
    used = f"{several}{at_once}{each} can use at most {count(sum(sizes))} of the {count(mean_idle)} {units}"
    return [f"{used} that are idle on average; add trainers, or let them use more {units}"]


def progress_of(one: Contestant, log: HoleLog, on_progress: OnProgress) -> Callable[[float], None]:
    """Return a callback that reports the time reached on the log's clock as a share of the contestant's replay."""
    doing = f"{one.policy}, closings {one.knowledge.value}"
    return lambda time: on_progress(doing, (time - log.start) / (log.end - log.start))


class _FirstRefusal(logging.Handler):
    """Stores why the planner first rejected a decision."""

    reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.reason is None and record.exc_info is not None:
            self.reason = str(record.exc_info[1])


@contextmanager
def _first_refusal() -> Iterator[_FirstRefusal]:
    """Collect the planner's log records of policy errors: in a replay there may be thousands."""
    logger, handler = logging.getLogger(planner.__name__), _FirstRefusal()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
