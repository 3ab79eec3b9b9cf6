"""The optimal policy: the count model of the planner, solved exactly, within a time limit."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool, moved_shares
from freetrain_parsl.planning.objectives.base import (
    Moment,
    ObjectiveLike,
    at_moment,
    charged,
    objective_table,
    value_table,
    without_own_costs,
)
from freetrain_parsl.planning.placement import SharedHosts, current_counts, place
from freetrain_parsl.planning.policies.base import ObjectivePolicy
from freetrain_parsl.planning.sizes import are_sizes
from freetrain_parsl.planning.solvers.counts import maximise_counts
from freetrain_parsl.planning.solvers.shared_hosts import maximise_on_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.objectives.base import Objective
    from freetrain_parsl.planning.solvers.highs import Counts, Solution, Table

__all__ = ["MilpPolicy", "move_cost"]

_REMEMBERED = 16  # solves: the planner alternates between the nodes that it has and those that it could have


class MilpPolicy(ObjectivePolicy):
    """Maximises the value over the next `horizon` less the costs of changing now.

    Nodes are interchangeable, so it decides counts; `place` then chooses nodes without moving trainers. Where trainers
    share hosts, a trainer is moved to another one only if that gains more than it costs. The allocation
    is never worth less than keeping the current one, and is deterministic unless the time limit is reached. The solver
    checks the time between steps: many trainers with convex values can exceed the limit.

    Parameters
    ----------
    objective
        Value per second of a trainer on a number of nodes: a name of `OBJECTIVES`, a function of both, or a
        `Contextual`.
    horizon
        How long a decision is expected to last: the time over which the gain of a change is weighed against its cost.
        ``None`` takes the estimate from the pool's history (`Pool.horizon`).
    time_limit
        After this time the best allocation so far is used; ``proven_optimal`` is then false and ``bound`` shows how
        much better another could be.
    gap
        Stop when no allocation is better by more than this, relative; 0 requires a proof of optimality.
    """

    name = "milp"
    by_counts = True

    def __init__(
        self,
        objective: ObjectiveLike = "speedup",
        *,
        horizon: timedelta | None = None,
        time_limit: timedelta = timedelta(seconds=1),
        gap: float = 0.0,
    ) -> None:
        super().__init__(objective, horizon, time_limit, gap)
        self._solved: deque[tuple[bytes, Solution]] = deque(maxlen=_REMEMBERED)

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        """Decide the allocation; see `Policy.allocate`."""
        started = time.perf_counter()
        ranked = sorted(trainers, key=lambda trainer: (trainer.submitted, trainer.name))
        held = current_counts(ranked, pool, current)
        if not ranked:
            return Decision({}, 0.0, proven_optimal=True, bound=0.0)
        objective = at_moment(self._objective, Moment(ranked, held, len(pool), now))
        horizon = self._horizon or pool.horizon
        values = np.stack([value_table(objective, t, held[t.name], len(pool), horizon) for t in ranked])
        shared = _Shared(pool, current, ranked, objective, values) if pool.slots_per_host > 1 else None
        solution = self._solve(values, _as_it_is(values, held, ranked), shared)
        counts = {t.name: int(count) for t, count in zip(ranked, solution.counts, strict=True)}
        return Decision(
            place(counts, pool, current, shared.move_costs, shared.hosts) if shared else place(counts, pool, current),
            solution.objective,
            proven_optimal=solution.is_proven,
            bound=solution.bound,
            solve_seconds=time.perf_counter() - started,
        )

    def _solve(self, values: Table, incumbent: Counts, shared: _Shared | None) -> Solution:
        """Solve, unless this is one of the latest problems again: decisions recur while nothing changes."""
        parts, finite = (shared.digest(), values[:, shared.sizes]) if shared else (b"", values)
        problem = blake2b(repr(values.shape).encode() + finite.tobytes() + incumbent.tobytes() + parts).digest()
        for known, solution in self._solved:
            if known == problem:
                return solution
        if shared is None:
            solution = maximise_counts(values, incumbent, time_limit=self._time_limit, gap=self._gap)
        else:
            solution = shared.maximise(values, incumbent, time_limit=self._time_limit, gap=self._gap)
        if solution.is_proven:  # otherwise another attempt may find more
            self._solved.append((problem, solution))
        return solution


class _Shared:
    """The hosts that trainers share, and what it costs to move them; limits `values` to sizes that they may have."""

    def __init__(
        self, pool: Pool, current: Allocation, ranked: Sequence[PlannedJob], objective: Objective, values: Table
    ) -> None:
        self.hosts = hosts = SharedHosts(pool, current)
        names = [trainer.name for trainer in ranked]
        self.sizes = are_sizes(np.arange(values.shape[1]), hosts.slots)
        values[:, ~self.sizes] = -np.inf
        held = np.array([sum(map(len, hosts.held.get(name, {}).values())) for name in names], dtype=np.int64)
        costs = np.array([move_cost(t, n, objective) for t, n in zip(ranked, held.tolist(), strict=True)])
        laid_out = np.array([hosts.is_laid_out(name) for name in names])
        rows = np.arange(len(names))
        values[rows, held] -= np.where((held > 0) & ~laid_out, costs, 0.0)  # it has to move in any case
        parts = hosts.parts(names, held)
        self.parts = replace(parts, host=np.where(laid_out & (held < hosts.slots), parts.host, -1))
        self.costs = costs
        self.move_costs = dict(zip(names, costs.tolist(), strict=True))

    def digest(self) -> bytes:
        """Return what distinguishes this problem from others with the same values."""
        return b"".join(part.tobytes() for part in (self.parts.free, self.parts.host, self.parts.sizes, self.costs))

    def maximise(self, values: Table, incumbent: Counts, *, time_limit: float, gap: float) -> Solution:
        """Solve; `maximise_on_hosts` describes the parameters."""
        stays = self.parts.all * (incumbent == self.parts.sizes)
        if not self.parts.fit(stays, incumbent):  # slots were lost, so that what is left of a trainer blocks others
            incumbent = np.zeros_like(incumbent)
        return maximise_on_hosts(values, incumbent, self.parts, self.costs, time_limit=time_limit, gap=gap)


def move_cost(trainer: PlannedJob, held: int, objective: Objective) -> float:
    """Return the cost of a move: a trainer grows on the other host, and leaves this one, at the rate that it has."""
    if not trainer.may_have(held):
        return 0.0
    rate = objective_table(charged(without_own_costs(objective)), trainer, held)[held]
    costs = trainer.costs
    moving = costs.sharded_bytes / costs.bandwidth * float(moved_shares(held, np.array([held]))[0])
    return (costs.up + costs.down + moving) * float(rate)


def _as_it_is(values: Table, held: dict[str, int], ranked: Sequence[PlannedJob]) -> Counts:
    """Return the current counts, or zero for a trainer that cannot continue on its remaining nodes."""
    counts = np.array([held[trainer.name] for trainer in ranked], dtype=np.int64)
    allowed = np.isfinite(values[np.arange(len(ranked)), counts])
    return np.where(allowed, counts, 0)
