"""The policy that takes closings into account: the window-aware model of the planner, within a time limit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.objectives.base import (
    Moment,
    Objective,
    ObjectiveLike,
    at_moment,
    charged,
    objective_table,
    without_own_costs,
)
from freetrain_parsl.planning.placement import current_counts
from freetrain_parsl.planning.policies.base import ObjectivePolicy
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.solvers.column_generation import maximise_windows
from freetrain_parsl.planning.solvers.window_model import Counts, Table, WindowInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WindowPolicy"]

_AT_ONCE = 1e-3  # seconds: the minimum time that a due node is assumed to last


class WindowPolicy(ObjectivePolicy):
    """Maximises the value of a decision over its expected duration, including the closings during that time.

    A decision lasts until something unforeseen invalidates it. That time is assumed to be exponentially distributed
    with mean T, the `horizon`: a value after t seconds is weighted by exp(-t/T). With nodes that never close this is
    the count model of `MilpPolicy`.

    If a closing is known, its nodes earn until then, and each trainer that holds any of them pays for a shrink. If it
    is unknown, nodes of this age are assumed to close at the rate h from the pool's history: the cost of a shrink is
    weighted by the probability hT / (1 + hT) that it occurs while the decision lasts. As a result, nodes that close
    together or are likely to close soon go to the same trainers, preferably small ones.

    In this model, the allocation is never worth less than that of the count model or the current one.

    Where trainers share hosts, it decides as `MilpPolicy`: closings then count only for which hosts are taken first
    (decision 74 says why, and what that loses).

    Parameters
    ----------
    objective
        Value per second of a trainer on a number of nodes, as in `MilpPolicy`.
    horizon
        T; ``None`` takes the estimate from the pool's history (`Pool.horizon`).
    time_limit
        After this time the best allocation so far is used.
    gap
        Stop when no allocation is better by more than this, relative.
    max_classes
        Nodes that close at about the same time are merged into at most this many classes.
    """

    name = "window"

    def __init__(
        self,
        objective: ObjectiveLike = "speedup",
        *,
        horizon: timedelta | None = None,
        time_limit: timedelta = timedelta(seconds=1),
        gap: float = 0.003,
        max_classes: int = 12,
    ) -> None:
        super().__init__(objective, horizon, time_limit, gap)
        if max_classes < 1:
            raise InvalidSettings(f"policy 'window': max_classes must be at least 1, got {max_classes!r}")
        self._max_classes = max_classes
        self._on_shared_hosts = MilpPolicy(objective, horizon=horizon, time_limit=time_limit, gap=gap)

    def seconds_of_use(self, pool: Pool, now: float) -> float:
        """Return the mean of the weighted seconds that the nodes last."""
        horizon = self._horizon or pool.horizon
        closings = (_closing(node, now, horizon) for node in pool.values())
        # A node of unknown closing that is lost loses, on average, that share of the horizon.
        seconds = (last if last < horizon else horizon * (1.0 - share) for last, share in closings)
        return fmean(seconds)

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        """Decide the allocation; see `Policy.allocate`."""
        started = time.perf_counter()
        ranked = sorted(trainers, key=lambda trainer: (trainer.submitted, trainer.name))
        if not ranked or not pool:
            return Decision({}, 0.0, proven_optimal=True, bound=0.0)
        if pool.slots_per_host > 1:
            return self._on_shared_hosts.allocate(pool, ranked, current, now)
        held = current_counts(ranked, pool, current)
        objective = without_own_costs(at_moment(self._objective, Moment(ranked, held, len(pool), now)))
        horizon = self._horizon or pool.horizon
        classes = _classes(pool, now, horizon, self._max_classes)
        instance = _instance(classes, ranked, held, current, objective, horizon, pool)
        half = self._time_limit / 2
        count_model = MilpPolicy(objective, horizon=timedelta(seconds=horizon), time_limit=timedelta(seconds=half))
        incumbent = _in_classes(classes, ranked, count_model.allocate(pool, ranked, current, now).allocation)
        left = max(half, started + self._time_limit - time.perf_counter())
        if not instance.feasible(incumbent):  # it needs more blocks than are allowed
            incumbent = instance.status_quo
        solution = maximise_windows(instance, incumbent, time_limit=left, gap=self._gap)
        return Decision(
            _nodes(solution.counts, classes, ranked, current),
            solution.objective,
            proven_optimal=solution.is_proven,
            bound=solution.bound,
            solve_seconds=time.perf_counter() - started,
        )


@dataclass(frozen=True)
class _Class:
    """Nodes that close at about the same time.

    Parameters
    ----------
    nodes
        Names, longest-lasting first.
    lasts
        Seconds that they last, each weighted as above; T if they never close.
    share
        Weight of the cost of their closing.
    startup
        Seconds until they are ready if a block must be requested for them, else zero.
    """

    nodes: tuple[str, ...]
    lasts: float
    share: float
    startup: float


def _classes(pool: Pool, now: float, horizon: float, most: int) -> list[_Class]:
    """Group nodes by closing and merge the nearest groups; held and offered nodes are kept apart."""
    ours = [node for node in pool.values() if node.startup == 0]
    others = [node for node in pool.values() if node.startup > 0]
    if not others:
        return _nearest(ours, now, horizon, most)
    return [*_nearest(ours, now, horizon, (most + 1) // 2), *_nearest(others, now, horizon, (most + 1) // 2)]


def _nearest(nodes: Sequence[PoolNode], now: float, horizon: float, most: int) -> list[_Class]:
    """Merge the nearest closings until at most `most` groups are left (Ward's method in one dimension)."""
    groups: dict[tuple[float, float], list[PoolNode]] = {}
    for node in nodes:
        groups.setdefault(_closing(node, now, horizon), []).append(node)
    # Known closings come first, in order of time, then unknown ones, most likely first.
    keys = sorted(groups, key=lambda key: (key[0], -key[1]))
    members = [groups[key] for key in keys]
    lasts, shares = np.array(keys, dtype=np.float64).reshape(-1, 2).T
    sizes = np.array([len(nodes) for nodes in members], dtype=np.float64)
    while len(members) > most:
        ranks = lasts + np.where(lasts < horizon, 0.0, (1.0 - shares) * horizon)
        spread = np.diff(ranks) ** 2 * sizes[1:] * sizes[:-1] / (sizes[1:] + sizes[:-1])
        first = int(np.argmin(spread))
        both = slice(first, first + 2)
        weights = sizes[both] / sizes[both].sum()
        lasts[first], shares[first], sizes[first] = weights @ lasts[both], weights @ shares[both], sizes[both].sum()
        lasts, shares, sizes = (np.delete(column, first + 1) for column in (lasts, shares, sizes))
        members[first] += members.pop(first + 1)
    return [
        _Class(
            tuple(node.name for node in sorted(nodes, key=lambda node: (-node.lasts_until, node.name))),
            float(last),
            float(share),
            nodes[0].startup,
        )
        for nodes, last, share in zip(members, lasts, shares, strict=True)
    ]


def _closing(node: PoolNode, now: float, horizon: float) -> tuple[float, float]:
    """Return the weighted seconds that a node lasts, and the weight of its closing."""
    if node.closes is None:
        closings = node.closing_rate * horizon
        return horizon, closings / (1.0 + closings)
    weight = math.exp(-max(_AT_ONCE, node.closes - now) / horizon)
    return horizon * (1.0 - weight), weight


def _instance(
    classes: Sequence[_Class],
    ranked: Sequence[PlannedJob],
    held: dict[str, int],
    current: Allocation,
    objective: Objective,
    horizon: float,
    pool: Pool,
) -> WindowInstance:
    # A count that a trainer may not have is charged at the nearest that it may have.
    widest = max(len(pool), *(t.nearest(held[t.name]) for t in ranked if held[t.name]), 1)
    rates = np.stack([objective_table(objective, trainer, widest) for trainer in ranked])
    factor = _charged_share(rates, ranked, held, objective, widest)
    return WindowInstance(
        rates,
        up=np.array([trainer.costs.up for trainer in ranked]) * factor,
        down=np.array([trainer.costs.down for trainer in ranked]) * factor,
        start=np.array([trainer.costs.start for trainer in ranked]) * factor,
        moving=np.array([trainer.costs.sharded_bytes / trainer.costs.bandwidth for trainer in ranked]) * factor,
        checkpoint=np.zeros(len(ranked)),
        current=_in_classes(classes, ranked, current),
        sizes=np.array([len(item.nodes) for item in classes]),
        closings=np.array([item.lasts if item.lasts < horizon else np.inf for item in classes]),
        horizon=horizon,
        shares=np.array([item.share for item in classes]),
        offered=np.array([item.startup > 0 for item in classes]),
        startup=horizon * (1.0 - math.exp(-max(item.startup for item in classes) / horizon)),
        max_blocks=pool.max_blocks,
    )


def _charged_share(
    rates: Table, ranked: Sequence[PlannedJob], held: dict[str, int], objective: Objective, widest: int
) -> Table:
    """Return the share of a trainer's value at which changes are charged: less than one if it has a bonus."""
    plain = charged(objective)
    if plain is objective:
        return np.ones(len(ranked))
    shares = np.ones(len(ranked))
    for row, trainer in enumerate(ranked):
        at = trainer.nearest(min(held[trainer.name], widest))
        if at <= widest and rates[row, at] > 0:
            shares[row] = objective_table(plain, trainer, at)[at] / rates[row, at]
    return shares


def _in_classes(classes: Sequence[_Class], ranked: Sequence[PlannedJob], allocation: Allocation) -> Counts:
    """Count the trainers' nodes of each class, shape (J, K)."""
    kind = {node: index for index, item in enumerate(classes) for node in item.nodes}
    counts = np.zeros((len(ranked), len(classes)), dtype=np.int64)
    for row, trainer in enumerate(ranked):
        for node in allocation.get(trainer.name, ()):
            if node in kind:
                counts[row, kind[node]] += 1
    return counts


def _nodes(
    counts: Counts, classes: Sequence[_Class], ranked: Sequence[PlannedJob], current: Allocation
) -> dict[str, frozenset[str]]:
    """Choose nodes of the classes: trainers keep their own nodes, longest-lasting first."""
    given: dict[str, set[str]] = {trainer.name: set() for trainer in ranked}
    for index, item in enumerate(classes):
        free = list(item.nodes)
        wanted = {trainer.name: int(counts[row, index]) for row, trainer in enumerate(ranked) if counts[row, index]}
        for name, number in wanted.items():
            own = current.get(name, frozenset())
            given[name].update([node for node in free if node in own][:number])
        free = [node for node in free if not any(node in given[name] for name in wanted)]
        for name, number in wanted.items():
            missing = number - sum(node in given[name] for node in item.nodes)
            given[name].update(free[:missing])
            del free[:missing]
    return {name: frozenset(nodes) for name, nodes in given.items() if nodes}
