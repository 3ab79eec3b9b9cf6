"""The published baseline: equal shares, regardless of scaling and rescale costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from freetrain_parsl.planning.model import Allocation, Decision, Pool, Trainer
from freetrain_parsl.planning.objectives.base import Moment, ObjectiveLike, at_moment, resolve_objective, value_table
from freetrain_parsl.planning.placement import current_counts, place
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

__all__ = ["EqualSharePolicy"]


class EqualSharePolicy(Policy):
    """Equal shares, as in the baseline of BFTrainer (arXiv 2106.12091).

    With N nodes and J trainers, each trainer gets ``q = N // J``, up to its ``max_nodes``, or nothing unless q exceeds
    its ``min_nodes`` (as published: a trainer whose ``min_nodes`` equals q gets nothing). The remaining nodes are
    allocated first come, first served, up to ``max_nodes``.

    ``objective`` and ``bound`` of its decisions are in the value model of `MilpPolicy`, so that the two are
    comparable. It proves nothing: its bound is the value of the trainers if each had the pool to itself.

    Parameters
    ----------
    objective, horizon
        The value model, as in `MilpPolicy`; they do not affect the allocation.
    """

    name = "equal-share"

    def __init__(self, objective: ObjectiveLike = "speedup", *, horizon: timedelta | None = None) -> None:
        if horizon is not None:
            check_duration("policy 'equal-share': horizon", horizon)
        self._objective = resolve_objective(objective)
        self._horizon = None if horizon is None else horizon.total_seconds()

    def allocate(self, pool: Pool, trainers: Sequence[Trainer], current: Allocation, now: float) -> Decision:
        """Decide the allocation; see `Policy.allocate`."""
        started = time.perf_counter()
        ranked = sorted(trainers, key=lambda trainer: (trainer.submitted, trainer.name))
        counts = _equal_shares(ranked, len(pool))
        held = current_counts(ranked, pool, current)
        worth = at_moment(self._objective, Moment(ranked, held, len(pool), now))
        objective = bound = 0.0
        for trainer in ranked:
            values = value_table(worth, trainer, held[trainer.name], len(pool), self._horizon or pool.horizon)
            objective += float(values[counts[trainer.name]])
            bound += float(values.max())
        allocation = place(counts, pool, current)
        seconds = time.perf_counter() - started
        return Decision(allocation, objective, proven_optimal=False, bound=bound, solve_seconds=seconds)


def _equal_shares(ranked: Sequence[Trainer], nodes: int) -> dict[str, int]:
    share = nodes // len(ranked) if ranked else 0
    counts = {t.name: min(share, t.max_nodes) if share > t.min_nodes else 0 for t in ranked}
    left = nodes - sum(counts.values())
    for trainer in ranked:
        extra = min(left, trainer.max_nodes - counts[trainer.name])
        if counts[trainer.name] + extra >= trainer.min_nodes:
            counts[trainer.name] += extra
            left -= extra
    return counts
