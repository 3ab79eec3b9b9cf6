"""Interface of policies: (pool, trainers, current allocation, now) -> decision; and the base of published baselines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool
from freetrain_parsl.planning.objectives.base import (
    SPEEDUP,
    Contextual,
    Moment,
    Objective,
    ObjectiveLike,
    at_moment,
    resolve_objective,
    value_table,
)
from freetrain_parsl.planning.placement import current_counts, place
from freetrain_parsl.planning.sizes import room, wanted
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

__all__ = ["BaselinePolicy", "ObjectivePolicy", "Policy", "as_sizes"]


class Policy(ABC):
    """Allocates the nodes of a pool to trainers.

    A policy is deterministic and keeps no state between calls that changes its decisions. It gives a trainer either no
    nodes or a number that it may have (`PlannedJob.may_have`), and never gives a node to two trainers.
    ``freetrain_parsl.testing`` has a test suite that checks this for your own policies.

    It is given nodes of one kind only: where there are several, `planning.node_kinds` first decides which trainer runs
    on which kind.
    """

    name: ClassVar[str]
    by_counts: ClassVar[bool] = False
    """Whether it maximises the sum over trainers of the value of their numbers of nodes."""
    any_layout: ClassVar[bool] = False
    """Whether it gives trainers any number of slots on any hosts that they share, as published policies do; only replay
    and simulation accept that."""

    @property
    def objective(self) -> Objective | Contextual:
        """The value per second by which the kind of a trainer's nodes is chosen; default: its speedup."""
        return SPEEDUP

    def seconds_of_use(self, pool: Pool, now: float) -> float:  # noqa: ARG002 - for policies that know of closings
        """Return for how long a node of the pool counts when the kind of a trainer's nodes is chosen, s."""
        return pool.horizon

    @abstractmethod
    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        """Decide which trainer gets which nodes from `now` on.

        `current` may contain nodes that have left the pool; these are no longer available.
        """


class ObjectivePolicy(Policy):
    """A policy that maximises an objective, within a time limit; `MilpPolicy` describes the parameters."""

    def __init__(self, objective: ObjectiveLike, horizon: timedelta | None, time_limit: timedelta, gap: float) -> None:
        if horizon is not None:
            check_duration(f"policy {self.name!r}: horizon", horizon)
        check_duration(f"policy {self.name!r}: time_limit", time_limit)
        if not 0 <= gap < 1:
            raise InvalidSettings(f"policy {self.name!r}: gap must lie in [0, 1), got {gap!r}")
        self._objective = resolve_objective(objective)
        self._horizon = None if horizon is None else horizon.total_seconds()
        self._time_limit = time_limit.total_seconds()
        self._gap = gap

    @property
    def objective(self) -> Objective | Contextual:
        """What it maximises."""
        return self._objective

    def seconds_of_use(self, pool: Pool, now: float) -> float:  # noqa: ARG002 - signature of a policy
        """Return the horizon; see `Policy.seconds_of_use`."""
        return self._horizon or pool.horizon


class BaselinePolicy(Policy):
    """A policy that decides by a rule.

    ``objective`` and ``bound`` of its decisions are in the value model of `MilpPolicy`, so that policies are
    comparable. It proves nothing: its bound is the value of the trainers if each had the pool to itself.

    Parameters
    ----------
    objective, horizon
        The value model, as in `MilpPolicy`; they do not affect the allocation.
    """

    def __init__(self, objective: ObjectiveLike = "speedup", *, horizon: timedelta | None = None) -> None:
        if horizon is not None:
            check_duration(f"policy {self.name!r}: horizon", horizon)
        self._objective = resolve_objective(objective)
        self._horizon = None if horizon is None else horizon.total_seconds()

    @abstractmethod
    def counts(self, ranked: Sequence[PlannedJob], pool: Pool, current: Allocation) -> Mapping[str, int]:
        """Decide the number of nodes of each trainer; absent ones get none.

        Parameters
        ----------
        ranked
            The trainers, in order of submission.
        pool, current
            As in `Policy.allocate`.
        """

    def place(self, counts: Mapping[str, int], pool: Pool, current: Allocation) -> Allocation:
        """Choose the nodes; a policy of `any_layout` has a placement of its own."""
        return place(counts, pool, current)

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        """Decide the allocation; see `Policy.allocate`."""
        started = time.perf_counter()
        ranked = sorted(trainers, key=lambda trainer: (trainer.submitted, trainer.name))
        counts = as_sizes(self.counts(ranked, pool, current), ranked, pool, any_layout=self.any_layout)
        allocation = self.place(counts, pool, current)
        seconds = time.perf_counter() - started
        held = current_counts(ranked, pool, current)
        worth = at_moment(self._objective, Moment(ranked, held, len(pool), now))
        objective = bound = 0.0
        for trainer in ranked:
            values = value_table(worth, trainer, held[trainer.name], len(pool), self._horizon or pool.horizon)
            objective += float(values[counts.get(trainer.name, 0)])
            bound += float(values.max())
        return Decision(allocation, objective, proven_optimal=False, bound=bound, solve_seconds=seconds)


def as_sizes(
    counts: Mapping[str, int], trainers: Sequence[PlannedJob], pool: Pool, *, any_layout: bool = False
) -> dict[str, int]:
    """Round counts down to those that trainers may have, and to sizes for which shared hosts have room, in their order.

    A trainer without such a count gets nothing. With `any_layout` (see `Policy.any_layout`), all counts are sizes.
    """
    slots = 1 if any_layout else pool.slots_per_host
    known = {trainer.name: trainer for trainer in trainers}
    if slots == 1:
        return {name: known[name].at_most(count) for name, count in counts.items()}
    left = room(Counter(node.machine for node in pool.values()).values(), slots)
    sizes: dict[str, int] = {}
    for name, count in counts.items():
        size = known[name].at_most(count, slots)
        while size and (wanted(np.array([size]), slots) > left).any():
            size = known[name].at_most(size - 1, slots)
        sizes[name] = size
        left = left - wanted(np.array([size]), slots)
    return sizes
