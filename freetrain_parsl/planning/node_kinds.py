"""Several kinds of nodes: which trainer runs on which kind, and then a policy's decision within each kind.

The processes of a trainer are alike, so it runs on nodes of one kind at a time, at that kind's scaling curve. A kind is
a pool of its own. With v_jk(n) the value of trainer j on n nodes of kind k over the time that a decision lasts, less
the costs of the change, the kinds solve

::

    max  sum_jkn v_jkn x_jkn    subject to    sum_kn x_jkn <= 1  for every trainer j,
                                              sum_jn n x_jkn <= N_k  for every kind k,      x binary

a multiple choice over kinds and counts with one capacity for each kind, solved exactly by `solvers.multiple_choice`.
The policy then allocates the nodes of each kind to the trainers that were chosen for it. For a policy that maximises
this same value by counts (``milp``), both steps together are the optimum. Others decide within each kind as they do
without kinds: what a policy knows beyond counts, such as closings, has no influence on the choice of the kind beyond
`Policy.seconds_of_use`.

Where no trainer has a choice, nothing is solved. Where there is one kind only, the policy is called as it is.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.model import Decision, Pool
from freetrain_parsl.planning.objectives.base import (
    Contextual,
    Moment,
    NetOfChanges,
    at_moment,
    charged,
    objective_table,
    value_table,
)
from freetrain_parsl.planning.placement import current_counts
from freetrain_parsl.planning.sizes import are_sizes
from freetrain_parsl.planning.solvers.highs import is_proven
from freetrain_parsl.planning.solvers.multiple_choice import NOTHING, ChoiceSolution, maximise_choices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from freetrain_parsl.planning.model import Allocation, PlannedJob, PoolNode
    from freetrain_parsl.planning.objectives.base import Objective, Table
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["allocate_over_kinds", "kinds_of"]

_TIME_LIMIT = 1.0  # seconds


def kinds_of(nodes: Iterable[PoolNode]) -> list[str]:
    """Return the kinds of some nodes, in order of name."""
    return sorted({node.node_kind for node in nodes})


def allocate_over_kinds(
    policy: Policy, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float
) -> Decision:
    """Decide which trainer gets which nodes, all of one kind; see `Policy.allocate` for the parameters."""
    kinds_here = kinds_of(pool.values())
    if len(kinds_here) <= 1 and not any(trainer.node_kinds or trainer.curves for trainer in trainers):
        return policy.allocate(pool, trainers, current, now)
    started = time.perf_counter()
    pools = {
        kind: Pool(
            (node for node in pool.values() if node.node_kind == kind),
            pool.horizon,
            pool.max_blocks,
            pool.slots_per_host,
        )
        for kind in kinds_here
    }
    ranked = sorted(trainers, key=lambda trainer: (trainer.submitted, trainer.name))
    choices = _Choices(policy, pools, ranked, current, now)
    kinds, solution = choices.best()
    decisions = [
        policy.allocate(
            pool,
            [trainer.on_kind(kind) for trainer in ranked if kinds.get(trainer.name) == kind],
            {name: nodes for name, nodes in current.items() if kinds.get(name) == kind},
            now,
        )
        for kind, pool in pools.items()
    ]
    # A policy does not see that trainers leave another kind.
    left = math.fsum(choices.cost_of_leaving(trainer, kinds.get(trainer.name)) for trainer in ranked)
    exact = solution is None or (choices.are_those_of_policy and is_proven(solution.objective, solution.bound))
    return Decision(
        {name: nodes for decision in decisions for name, nodes in decision.allocation.items()},
        math.fsum(decision.objective for decision in decisions) - left,
        proven_optimal=exact and all(decision.proven_optimal for decision in decisions),
        bound=math.fsum(decision.bound for decision in decisions) - left if exact else math.inf,
        solve_seconds=time.perf_counter() - started,
    )


@dataclass
class _Choices:
    """The kinds and counts of all trainers, first come first, with their values; see `allocate_over_kinds`."""

    policy: Policy
    pools: Mapping[str, Pool]
    ranked: Sequence[PlannedJob]
    current: Allocation
    now: float

    def __post_init__(self) -> None:
        self._position = {kind: position for position, kind in enumerate(self.pools)}
        self._held = {kind: current_counts(self.ranked, pool, self.current) for kind, pool in self.pools.items()}
        self._objectives = {kind: self._objective_on(kind) for kind in self.pools}
        self._seconds = {kind: self.policy.seconds_of_use(pool, self.now) for kind, pool in self.pools.items()}

    @property
    def are_those_of_policy(self) -> bool:
        """Whether the policy maximises the same value, so that its optimum on the chosen kinds is the optimum."""
        on_whole_nodes = all(pool.slots_per_host == 1 for pool in self.pools.values())
        return self.policy.by_counts and on_whole_nodes and not isinstance(self.policy.objective, Contextual)

    def _objective_on(self, kind: str) -> Objective:
        """Return the objective of this moment, as if every trainer that may use the kind had to run on it."""
        usable = [trainer.on_kind(kind) for trainer in self.ranked if trainer.may_use(kind)]
        return at_moment(self.policy.objective, Moment(usable, self._held[kind], len(self.pools[kind]), self.now))

    def _kinds_for(self, trainer: PlannedJob) -> list[str]:
        """Return the kinds with enough nodes for a trainer."""
        return [kind for kind, pool in self.pools.items() if trainer.may_use(kind) and len(pool) >= trainer.min_nodes]

    def best(self) -> tuple[dict[str, str], ChoiceSolution | None]:
        """Choose the kind of each trainer that can run, and return the solution if there was a choice.

        A trainer gets a kind whether or not the solution has nodes for it: how many it gets is left to the policy.
        """
        kinds = {trainer.name: self._kinds_for(trainer) for trainer in self.ranked}
        chosen = {name: those[0] for name, those in kinds.items() if len(those) == 1}
        if all(len(those) <= 1 for those in kinds.values()):
            return chosen, None
        options = [self._options(trainer, kinds[trainer.name]) for trainer in self.ranked]
        solution = maximise_choices(
            [option.values for option in options],
            [option.demands(self._position) for option in options],
            np.array([len(pool) for pool in self.pools.values()], dtype=np.float64),
            incumbent=np.array([option.current for option in options], dtype=np.int64),
            time_limit=_TIME_LIMIT,
        )
        for trainer, option, choice in zip(self.ranked, options, solution.choices.tolist(), strict=True):
            if option.pairs:
                own = option.best if choice == NOTHING else choice
                chosen[trainer.name] = option.pairs[own][0]
        return chosen, solution

    def _options(self, trainer: PlannedJob, kinds: Iterable[str]) -> _Options:
        running = self._running_on(trainer)
        pairs: list[tuple[str, int]] = []
        values: list[float] = []
        current = NOTHING
        for kind in kinds:
            held, most = self._held[kind][trainer.name], len(self.pools[kind])
            table = value_table(self._objectives[kind], trainer.on_kind(kind), held, most, self._seconds[kind])
            table[~are_sizes(np.arange(most + 1), self.pools[kind].slots_per_host)] = -np.inf
            # Values are compared with stopping, which costs a trainer that leaves this kind as much.
            saved = self._stopping(trainer, kind) if kind == running else 0.0
            for count in np.flatnonzero(np.isfinite(table[1:])) + 1:
                if held == count:
                    current = len(pairs)
                pairs.append((kind, int(count)))
                values.append(float(table[count]) + saved)
        return _Options(pairs, np.array(values), current)

    def cost_of_leaving(self, trainer: PlannedJob, kind: str | None) -> float:
        """Return the cost of leaving all nodes for another kind, or for none; zero if it stays on its kind."""
        running = self._running_on(trainer)
        return 0.0 if running is None or running == kind else self._stopping(trainer, running)

    def _running_on(self, trainer: PlannedJob) -> str | None:
        return next((kind for kind, held in self._held.items() if held[trainer.name]), None)

    def _stopping(self, trainer: PlannedJob, kind: str) -> float:
        """Return the cost of giving up its nodes of a kind."""
        objective, here = self._objectives[kind], trainer.on_kind(kind)
        if isinstance(objective, NetOfChanges):
            return 0.0
        held = here.nearest(self._held[kind][trainer.name])
        return here.costs.down * float(objective_table(charged(objective), here, held)[held])


@dataclass(frozen=True)
class _Options:
    """The options of a trainer.

    Parameters
    ----------
    pairs
        Kinds and numbers of nodes.
    values
        Their values over having nothing, shape (len(pairs),).
    current
        Position of its present pair, or `NOTHING`.
    """

    pairs: Sequence[tuple[str, int]]
    values: Table
    current: int

    @property
    def best(self) -> int:
        """The position of its present pair, else of the most valuable one."""
        return int(np.argmax(self.values)) if self.current == NOTHING else self.current

    def demands(self, position: Mapping[str, int]) -> Table:
        """Return the nodes of each kind that each pair needs, shape (len(pairs), number of kinds)."""
        needs = np.zeros((len(self.pairs), len(position)))
        for row, (kind, count) in enumerate(self.pairs):
            needs[row, position[kind]] = count
        return needs
