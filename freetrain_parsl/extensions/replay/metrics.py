"""Metrics of a replay: efficiency, losses, and the figures of log, decisions and trainers.

Efficiency U is the value of the training job done in the holes, relative to the value that the same trainers reach in
the same time on as many dedicated nodes as were idle on average. If the mean is not an integer, the dedicated value is
interpolated linearly between its neighbours. Value is the objective per second, integrated over time: with
``throughput``, samples. Efficiency and losses add up to 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.accounts import Bins
from freetrain_parsl.extensions.replay.ideal import ideal_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from freetrain_parsl.extensions.replay.accounts import Account
    from freetrain_parsl.extensions.replay.holes import HoleLog
    from freetrain_parsl.extensions.replay.ideal import BestRates
    from freetrain_parsl.extensions.replay.simulation import Outcome

__all__ = [
    "Yardstick",
    "completion_times",
    "log_figures",
    "node_series",
    "policy_figures",
    "run_figures",
    "running_shares",
]

_HOUR = 3600.0
_FASTEST_MS = 2.0**-4  # of the histogram's first column, which includes anything faster
_NODE_DIGITS, _SHARE_DIGITS = 3, 5  # of the series: more than a chart shows, in a file of moderate size


@dataclass(frozen=True)
class Yardstick:
    """The reference values for policies, for the same trainers and log.

    Parameters
    ----------
    nodes
        Dedicated nodes: the mean number of idle nodes.
    dedicated
        Value that the trainers reach on them, interpolated between the integers below and above; rescaling is free,
        but only occurs when trainers are submitted or end.
    oracle
        Value that they reach in the holes if rescaling is free.
    dedicated_bins, oracle_bins
        ``value`` of both over time.
    """

    nodes: float
    dedicated: float
    oracle: float
    dedicated_bins: Bins
    oracle_bins: Bins

    @classmethod
    def of(cls, rates: BestRates, log: HoleLog, *, concurrent: int | None = None) -> Yardstick:
        """Compute the reference values.

        Raises
        ------
        InvalidInput
            No node was ever idle.
        """
        by_kind = log.mean_idle_by_kind()
        mean_idle = sum(by_kind.values())
        if mean_idle <= 0:
            raise InvalidInput(f"{log.name}: no node is ever idle, so there is nothing to train in")
        dedicated_bins, oracle_bins = Bins(log.start, log.end), Bins(log.start, log.end)
        dedicated = 0.0
        for corner in product(*map(_neighbours, by_kind.values())):
            nodes, share = tuple(count for count, _ in corner), math.prod(weight for _, weight in corner)
            bins = Bins(log.start, log.end)
            dedicated += share * ideal_value(rates, log, nodes=nodes, concurrent=concurrent, bins=bins)
            dedicated_bins.include(bins, share)
        oracle = ideal_value(rates, log, concurrent=concurrent, bins=oracle_bins)
        return cls(mean_idle, dedicated, oracle, dedicated_bins, oracle_bins)


def _neighbours(mean: float) -> list[tuple[int, float]]:
    """Return the integers around a mean with their weights in a linear interpolation."""
    below = math.floor(mean)
    return [(below, 1 - (mean - below)), (below + 1, mean - below)] if mean > below else [(below, 1.0)]


def log_figures(log: HoleLog) -> dict[str, Any]:
    """Describe a log: its span in seconds, the number of changes, and the number of idle nodes, weighted by time."""
    seconds_with: defaultdict[int, float] = defaultdict(float)
    idle, since, events = 0, log.start, 0
    for change in log.changes():
        seconds_with[idle] += change.time - since
        idle += len(change.opened) - len(change.closed)
        since, events = change.time, events + 1
    seconds_with[idle] += log.end - since
    span = log.end - log.start
    return {
        "name": log.name,
        "nodes": log.nodes,
        "start": log.start,
        "end": log.end,
        "seconds": span,
        "events": events,
        "mean_idle": sum(count * seconds for count, seconds in seconds_with.items()) / span,
        "median_idle": _weighted_median(seconds_with, span),
        "skipped": log.skipped,
        "clipped": log.clipped,
        "zero_length": log.zero_length,
        "masked": [list(span) for span in log.masked],
        "date": None if log.date is None else log.date.isoformat(),
    }


def _weighted_median(seconds_with: Mapping[int, float], span: float) -> int:
    passed = 0.0
    for count, seconds in sorted(seconds_with.items()):
        passed += seconds
        if passed >= span / 2:
            return count
    return max(seconds_with)


def policy_figures(
    outcome: Outcome, yardstick: Yardstick, *, price_per_node_hour: float | None = None
) -> dict[str, Any]:
    """Compute the metrics of a policy; the price of a node-hour is in any currency.

    Returns
    -------
    dict
        Plain values, as in the JSON of ``freetrain replay``; efficiency and losses are ``None`` if the trainers cannot
        run on the dedicated nodes.
    """
    return {
        **_shares(outcome, yardstick),
        **run_figures(outcome, price_per_node_hour=price_per_node_hour),
        "series": _series(outcome, yardstick),
    }


def run_figures(outcome: Outcome, *, price_per_node_hour: float | None = None) -> dict[str, Any]:
    """Compute the metrics that need no reference values; see `policy_figures`."""
    solves = np.array([seconds for seconds, _ in outcome.decisions]) * 1000
    idle_hours, used_hours = outcome.idle_seconds / _HOUR, outcome.used_seconds / _HOUR
    start = outcome.bins.start
    return {
        "events": outcome.events,
        "solves": len(solves),
        "solve_ms": {
            "median": float(np.median(solves)) if len(solves) else None,
            "p99": float(np.percentile(solves, 99)) if len(solves) else None,
            "max": float(solves.max()) if len(solves) else None,
        },
        "proven_optimal_share": sum(proven for _, proven in outcome.decisions) / len(solves) if len(solves) else None,
        "refused": outcome.refused,
        "blocks": {"requested": outcome.blocks, "preempted": outcome.preempted_blocks},
        "wall_seconds": outcome.wall_seconds,
        "jct": completion_times(
            [account.finished - account.submitted for account in outcome.accounts if account.finished is not None]
        ),
        "node_hours": {"idle": idle_hours, "used": used_hours},
        "used_by_kind": _used_by_kind(outcome.accounts),
        "idle_cost": None
        if price_per_node_hour is None
        else {
            "price_per_node_hour": price_per_node_hour,
            "idle": price_per_node_hour * idle_hours,
            "used": price_per_node_hour * used_hours,
        },
        "trainers": [_trainer_figures(account, start) for account in outcome.accounts],
        "solve_histogram": _histogram(solves),
    }


def _shares(outcome: Outcome, yardstick: Yardstick) -> dict[str, float | None]:
    """Split 1 into efficiency and losses."""
    whole, oracle = yardstick.dedicated, yardstick.oracle
    values = {
        "efficiency": outcome.value,
        "oracle": oracle,
        "loss_concavity": whole - oracle,
        "loss_unused": outcome.unused,
        "loss_split": oracle - outcome.value - outcome.unused - outcome.losses.total,
        "loss_rescale": outcome.losses.rescale,
        "loss_preemption": outcome.losses.preemption,
        "loss_start": outcome.losses.start,
    }
    shares = {name: value / whole if whole else None for name, value in values.items()}
    return {**shares, "oracle_ratio": outcome.value / oracle if oracle else None}


def completion_times(times: Sequence[float]) -> dict[str, float | int | None]:
    """Summarise the seconds from submission to the end of training jobs that are done."""
    if not times:
        return {"finished": 0, "mean": None, "median": None, "p95": None}
    return {
        "finished": len(times),
        "mean": float(np.mean(times)),
        "median": float(np.median(times)),
        "p95": float(np.percentile(times, 95)),
    }


def _trainer_figures(account: Account, start: float) -> dict[str, Any]:
    work = account.trainer.work_left
    return {
        "name": account.trainer.name,
        "submitted": account.submitted - start,
        "started": None if account.started is None else account.started - start,
        "finished": None if account.finished is None else account.finished - start,
        "samples": account.samples,
        "work": None if math.isinf(work) else work,
        "node_hours": account.node_seconds / _HOUR,
        "used_by_kind": _used_by_kind([account]),
        "rescales": account.rescales,
        "preemptions": account.preemptions,
    }


def _used_by_kind(accounts: Iterable[Account]) -> dict[str, float]:
    """Return the node-hours used of each kind of nodes; empty if all nodes are alike."""
    used: defaultdict[str, float] = defaultdict(float)
    for account in accounts:
        for kind, seconds in account.seconds_by_kind.items():
            used[kind] += seconds / _HOUR
    return dict(sorted(used.items()))


def _series(outcome: Outcome, yardstick: Yardstick) -> dict[str, Any]:
    bins = outcome.bins
    dedicated = np.cumsum(yardstick.dedicated_bins.sums("value"))
    return {
        **node_series(outcome, [account.trainer.name for account in outcome.accounts]),
        "efficiency": running_shares(bins.sums("value"), dedicated),
        "oracle": running_shares(yardstick.oracle_bins.sums("value"), dedicated),
    }


def node_series(outcome: Outcome, names: Sequence[str]) -> dict[str, Any]:
    """Return the mean number of idle nodes, and of nodes used by each of `names`, over time."""
    bins = outcome.bins
    used = {name: outcome.trainer_bins.sums(name) for name in names}
    return {
        "time": [round(number * bins.seconds, _NODE_DIGITS) for number in range(bins.number)],
        "bin_seconds": bins.seconds,
        "idle": _rounded(bins.sums("idle") / bins.seconds),
        "used": {name: _rounded(sums / bins.seconds) for name, sums in used.items() if sums.any()},
    }


def _rounded(values: npt.NDArray[np.float64]) -> list[float]:
    rounded: list[float] = np.round(values, _NODE_DIGITS).tolist()
    return rounded


def running_shares(values: npt.NDArray[np.float64], dedicated: npt.NDArray[np.float64]) -> list[float | None]:
    """Return the cumulative share up to the end of each bin."""
    pairs = zip(np.cumsum(values).tolist(), dedicated.tolist(), strict=True)
    return [round(value / whole, _SHARE_DIGITS) if whole else None for value, whole in pairs]


def _histogram(solves: npt.NDArray[np.float64]) -> dict[str, list[float]]:
    """Count solve times, milliseconds, in columns of doubling width."""
    if not len(solves):
        return {"edges_ms": [], "counts": []}
    times = np.maximum(solves, _FASTEST_MS)
    first = math.floor(math.log2(times.min()))
    last = max(math.ceil(math.log2(times.max())), first + 1)
    edges = 2.0 ** np.arange(first, last + 1)
    return {"edges_ms": edges.tolist(), "counts": np.histogram(times, edges)[0].tolist()}
