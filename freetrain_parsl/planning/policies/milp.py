"""The optimal policy: the count model of the planner, solved exactly by HiGHS, within a time limit."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool
from freetrain_parsl.planning.objectives.base import (
    Moment,
    ObjectiveLike,
    at_moment,
    value_table,
)
from freetrain_parsl.planning.placement import current_counts, keep_to_whole_hosts, place
from freetrain_parsl.planning.policies.base import ObjectivePolicy
from freetrain_parsl.planning.solvers.counts import maximise_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.solvers.highs import Counts, Solution, Table

__all__ = ["MilpPolicy"]

_REMEMBERED = 16  # solves: the planner alternates between the nodes that it has and those that it could have


class MilpPolicy(ObjectivePolicy):
    """Maximises the value over the next `horizon` less the costs of changing now.

    Nodes are interchangeable, so it decides counts; `place` then chooses nodes without moving trainers. The allocation
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
        keep_to_whole_hosts(values, pool.nodes_per_host)
        solution = self._solve(values, _as_it_is(values, held, ranked))
        counts = {t.name: int(count) for t, count in zip(ranked, solution.counts, strict=True)}
        return Decision(
            place(counts, pool, current),
            solution.objective,
            proven_optimal=solution.is_proven,
            bound=solution.bound,
            solve_seconds=time.perf_counter() - started,
        )

    def _solve(self, values: Table, incumbent: Counts) -> Solution:
        """Solve, unless this is one of the latest problems again: decisions recur while nothing changes."""
        problem = blake2b(repr(values.shape).encode() + values.tobytes() + incumbent.tobytes()).digest()
        for known, solution in self._solved:
            if known == problem:
                return solution
        solution = maximise_counts(values, incumbent, time_limit=self._time_limit, gap=self._gap)
        if solution.is_proven:  # otherwise another attempt may find more
            self._solved.append((problem, solution))
        return solution


def _as_it_is(values: Table, held: dict[str, int], ranked: Sequence[PlannedJob]) -> Counts:
    """Return the current counts, or zero for a trainer that cannot continue on its remaining nodes."""
    counts = np.array([held[trainer.name] for trainer in ranked], dtype=np.int64)
    allowed = np.isfinite(values[np.arange(len(ranked)), counts])
    return np.where(allowed, counts, 0)
