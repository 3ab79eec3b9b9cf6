"""Allocate nodes of classes that close at different times: column generation, then a restricted programme.

The model is that of `planning.solvers.window_model`. A column is one trainer's choice of nodes of each class.

1. For prices of the nodes, `Pricing` finds the best column of every trainer. With them the prices bound the
   optimum from above (Lagrangian bound): sum of price times size over the classes held, the ``max_blocks`` largest
   of these products over the classes offered, and the values less price of the best columns.
2. A linear programme over the columns found so far (restricted master) gives the next prices, and so on until bound
   and master meet. New columns are generated at prices between the best known and the master's, which keeps the prices
   from oscillating.
3. A dive rounds the relaxation: the columns with the largest fractions are fixed, prices and columns are recomputed
   for the remaining nodes, and so on. Then every trainer takes its best response to what the others leave, as long as
   the total increases.
4. Repair: the trainers that are farthest from their best column dive again, with more and more others, while the rest
   is kept.
5. If the gap is still too large, a mixed-integer programme chooses among the promising columns: those whose reduced
   cost exceeds the gap are in no better solution (reduced-cost fixing).

It stops as soon as the best counts are close enough to the bound. Held classes with the same end are merged first, and
a single class is the count model.

Barnhart et al. (1998) describe the method, Wentges (1997) the smoothing of prices.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.solvers.counts import maximise_counts
from freetrain_parsl.planning.solvers.highs import Solution
from freetrain_parsl.planning.solvers.pricing import Pricing
from freetrain_parsl.planning.solvers.restricted_master import Columns, Master, choose_greedily, choose_optimally
from freetrain_parsl.planning.solvers.window_model import Counts, Table, WindowInstance, evaluate, trainer_values

__all__ = ["maximise_windows"]

logger = logging.getLogger(__name__)

_CLOSED = 1e-9  # of the bound: a smaller gap counts as zero
_SPREAD, _SAMPLES = (0.8, 1.2), 16  # factors of the prices at which the integer programme gets more columns
_TANGENTS = 2  # how often the tangents of start-ups are moved to the choices found
_RELAXED = 0.2  # of the gap: the relaxation counts as solved when the bound is this close to the known columns
_BOLD, _CAREFUL = 0.8, 0.95  # fraction from which a dive fixes a column at once
_FIRST_STEPS = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0)  # where the first columns are generated, from zero prices to a guess
_STEPS = (0.15, 0.4, 0.7, 1.0)  # where columns are generated, from the best known prices towards the master's


def maximise_windows(
    instance: WindowInstance, incumbent: Counts | None = None, *, time_limit: float = 1.0, gap: float = 0.005
) -> Solution:
    """Find counts of high value; deterministic unless the time limit is reached.

    Parameters
    ----------
    instance
        The problem.
    incumbent
        Counts to start from, shape (J, K); the result is never worth less than these or the status quo.
    time_limit
        Seconds after which the best counts so far are returned, with a bound. It is checked between steps.
    gap
        Stop at this distance from the bound, relative to it. Zero requests the best that the method finds: the bound
        may stay above the optimum.

    Raises
    ------
    PlanningError
        The incumbent is not feasible.
    """
    if incumbent is not None and not instance.feasible(incumbent):
        raise PlanningError("window model: the incumbent needs more nodes than available, or a count not allowed")
    started = [instance.status_quo] if incumbent is None else [instance.status_quo, incumbent]
    best = max(started, key=lambda counts: evaluate(instance, counts))
    small, number = instance.merged()
    merge = (number[:, None] == np.arange(len(small.sizes))).astype(np.int64)
    if not small.capacities.any() or not len(best):
        solution = Solution(best @ merge, evaluate(instance, best), evaluate(instance, best))
    elif len(small.sizes) == 1 and small.blocks == np.count_nonzero(small.is_offered):
        solution = _one_class(small, best @ merge, time_limit, gap)
    else:
        solution = _Search(small, best @ merge, time_limit, gap).run()
    return replace(solution, counts=instance.divided(solution.counts, number))


def _one_class(instance: WindowInstance, incumbent: Counts, time_limit: float, gap: float) -> Solution:
    """Solve an instance with a single class, which is the count model."""
    size = int(instance.capacities[0])
    rows = np.repeat(np.arange(len(incumbent)), size + 1)
    choices = np.tile(np.arange(size + 1), len(incumbent))[:, None]
    values = trainer_values(instance, rows, choices).reshape(-1, size + 1)
    found = maximise_counts(values, incumbent[:, 0], time_limit=time_limit, gap=gap)
    return Solution(found.counts[:, None], found.objective, found.bound)


class _Search:
    """The state of one solve: best counts, best bound and its prices, and the known columns."""

    def __init__(self, instance: WindowInstance, incumbent: Counts, time_limit: float, gap: float) -> None:
        self._instance = instance
        self._deadline = time.perf_counter() + time_limit
        self._gap = gap
        self._pricing = Pricing(instance)
        self._trainers = np.arange(len(instance.rates))
        self._counts = np.zeros_like(instance.current)
        self._objective = evaluate(instance, self._counts)
        self._bound = self._relaxed = np.inf
        self._prices = np.zeros(len(instance.sizes))
        self._touch = instance.totals.copy()
        self._pool = Columns(len(instance.sizes))
        self.offer(incumbent)
        self._pool.add(self._trainers, self._counts * 0, self._values(self._counts * 0))

    def offer(self, counts: Counts) -> None:
        """Store feasible counts if they are better than the best known."""
        objective = evaluate(self._instance, counts)
        if objective > self._objective:
            self._counts, self._objective = counts.copy(), objective
        self._pool.add(self._trainers, counts, self._values(counts))

    def run(self) -> Solution:
        instance = self._instance
        guess = _first_prices(instance)
        self._price(np.array(_FIRST_STEPS)[:, None] * guess)
        self.offer(choose_greedily(instance, self._pool, self._prices))
        try:
            self._improve()
        except PlanningError as error:
            # Counts and bound are valid, even if not the best possible: a decision is needed in any case.
            logger.warning("%s; using the best counts so far", error)
        return Solution(self._counts, self._objective, max(self._bound, self._objective))

    def _improve(self) -> None:
        if self._done():
            return
        master = Master(self._instance, max(abs(self._bound), abs(self._objective)))
        self._generate(master)
        if not self._done():
            self._dive(master, self._trainers, _BOLD)
        self._repair(master)
        if not self._done():
            self._restricted()

    def _generate(self, master: Master) -> None:
        """Generate columns until they contain the optimum of the relaxation, up to a tolerance."""
        halfway = (time.perf_counter() + self._deadline) / 2  # the other half is for integer solutions
        while not self._done() and time.perf_counter() < halfway:
            self._relaxed, prices, _ = master.solve(self._pool)
            if self._bound - self._relaxed <= max(_RELAXED * self._gap, _CLOSED) * abs(self._bound):
                break
            before, bound = len(self._pool), self._bound
            self._price(self._prices + np.array(_STEPS)[:, None] * (prices - self._prices))
            if len(self._pool) == before and self._bound >= bound:
                break

    def _repair(self, master: Master) -> None:
        """Repeat the dive for the trainers farthest from their best column, with ever more others, while it helps."""
        pool, many = self._pool, 2
        while not self._done():
            losses = pool.losses(self._prices, len(self._trainers))[pool.find(self._trainers, self._counts)]
            order = np.argsort(-losses, kind="stable")
            most = 1 + int(np.searchsorted(np.cumsum(losses[order]), 0.9 * losses.sum()))
            before = self._objective
            self._dive(master, order[: many * most], _CAREFUL)
            if self._objective <= before:
                if many * most >= len(order):
                    break
                many *= 3

    def _dive(self, master: Master, free: Counts, sure: float) -> None:
        """Fix the columns with the largest fractions, generate others for the remaining nodes, and repeat.

        All trainers except `free` keep their nodes of the best counts. Fractions of at least `sure` are fixed at once.
        """
        instance = self._instance
        fixed = np.ones(len(self._trainers), dtype=bool)
        fixed[free] = False
        counts = np.where(fixed[:, None], self._counts, 0)
        if fixed.any():
            kept = self._trainers[fixed]
            master.solve(self._pool)  # it must contain all columns
            master.fix(self._pool.find(kept, counts[kept]).tolist())
        while not fixed.all() and time.perf_counter() < self._deadline:
            _, prices, fractions = master.solve(self._pool)
            chosen: list[int] = []
            for column in np.argsort(-fractions, kind="stable").tolist():
                row, choice = self._pool.rows[column], self._pool.counts[column]
                if fractions[column] < (sure if chosen else _CLOSED):
                    break
                if not fixed[row] and self._fits(choice, counts):
                    counts[row], fixed[row] = choice, True
                    chosen.append(column)
            if not chosen:
                break
            master.fix(chosen)
            rest = self._trainers[~fixed]
            if len(rest):
                free = np.broadcast_to(self._free(counts), (len(rest), len(prices)))
                _, answers = self._pricing.respond(rest, np.tile(prices, (len(rest), 1)), free)
                self._pool.add(rest, answers, trainer_values(instance, rest, answers))
        master.release()
        self._climb(counts)

    def _done(self) -> bool:
        close = self._bound - self._objective <= max(self._gap, _CLOSED) * abs(self._bound)
        return close or time.perf_counter() >= self._deadline

    def _values(self, counts: Counts) -> Table:
        return trainer_values(self._instance, self._trainers, counts)

    def _price(self, prices: Table) -> None:
        """Find columns at several prices, shape (P, K), and the bounds that these give."""
        instance, many = self._instance, len(prices)
        rows = np.tile(self._trainers, many)
        capacities = np.broadcast_to(instance.capacities, (len(rows), len(instance.sizes)))
        repeated = np.repeat(prices, len(self._trainers), axis=0)
        reduced, counts = self._pricing.respond(rows, repeated, capacities, self._touch[rows])
        tangents = _TANGENTS if instance.startup > 0 and instance.is_offered.any() else 0
        others = counts
        for _ in range(tangents):
            # Tangents at the choices found are tighter, unless they lead to other choices.
            touch = (others * ~instance.is_offered).sum(axis=1)
            again, others = self._pricing.respond(rows, repeated, capacities, touch)
            self._pool.add(rows, others, trainer_values(instance, rows, others))
            self._touch[rows] = np.where(again < reduced, touch, self._touch[rows])
            reduced = np.minimum(reduced, again)
        worth = prices * instance.capacities
        held = worth[:, ~instance.is_offered].sum(axis=1)
        offered = -np.sort(-worth[:, instance.is_offered], axis=1)[:, : instance.blocks].sum(axis=1)
        bounds = held + offered + reduced.reshape(many, -1).sum(axis=1)
        best = int(np.argmin(bounds))
        if bounds[best] < self._bound:
            self._bound, self._prices = float(bounds[best]), prices[best]
        self._pool.add(rows, counts, trainer_values(instance, rows, counts))

    def _climb(self, counts: Counts) -> None:
        """Let trainers take their best response to what the others leave, as long as the value increases."""
        instance, counts = self._instance, counts.copy()
        free_prices = np.zeros_like(counts, dtype=float)
        while time.perf_counter() < self._deadline:
            values = self._values(counts)
            free = self._free(counts)
            _, answers = self._pricing.respond(self._trainers, free_prices, free + counts)
            gains = trainer_values(instance, self._trainers, answers) - values
            applied = False
            for row in np.argsort(-gains, kind="stable").tolist():
                if gains[row] <= _CLOSED * abs(values[row]):
                    break
                changed = counts.copy()
                changed[row] = answers[row]
                if instance.feasible(changed):
                    counts, applied = changed, True
            if not applied:
                break
        self.offer(counts)

    def _free(self, counts: Counts) -> Counts:
        """Return the unused nodes of each class; zero for an unused offered class if the blocks are exhausted."""
        instance = self._instance
        used = counts.sum(axis=0)
        free: Counts = instance.capacities - used
        opened = instance.is_offered & (used > 0)
        if np.count_nonzero(opened) >= instance.blocks:
            free[instance.is_offered & ~opened] = 0
        return free

    def _fits(self, choice: Counts, counts: Counts) -> bool:
        """Return whether a trainer without nodes can have this choice next to the counts of the others."""
        used = counts.sum(axis=0) + choice
        opened = np.count_nonzero(self._instance.is_offered & (used > 0))
        return bool(np.all(used <= self._instance.capacities) and opened <= self._instance.blocks)

    def _restricted(self) -> None:
        """Choose among the columns that could be in a better solution."""
        # Start-ups may loosen the bound, which no choice of columns can fix.
        near = min(self._bound, (1 + _RELAXED * self._gap) * self._relaxed)
        target = near - self._gap * abs(self._bound)
        if self._objective >= target:
            return
        spread = np.random.default_rng(0).uniform(*_SPREAD, (_SAMPLES, len(self._prices)))
        self._price(self._prices * spread)
        room = self._bound - self._objective
        if room <= 0:  # the new prices have proven the solution optimal
            return
        losses = self._pool.losses(self._prices, len(self._trainers))
        counts = choose_optimally(
            self._instance,
            self._pool,
            losses,
            room,
            self._counts,
            time_limit=max(self._deadline - time.perf_counter(), 0.0),
            target=target,
        )
        self._climb(counts)


def _first_prices(instance: WindowInstance) -> Table:
    """Return the prices if changes were free: each interval's marginal value of a node, summed up to the closing.

    Shape (K,). The marginal value is the price at which the trainers' demands add up to the nodes alive.
    """
    earned = instance.earned
    nodes = np.arange(earned.shape[1])
    steepest = float((earned[:, 1:] / nodes[1:]).max(initial=0.0))
    if steepest <= 0:
        return np.zeros(len(instance.sizes))
    levels = steepest * np.geomspace(1e-3, 1.0, 40)
    demand = np.array([(earned - level * nodes).argmax(axis=1).sum() for level in levels])
    prices = np.zeros(len(instance.sizes))
    until = 0.0
    for end in np.unique(instance.ends).tolist():
        alive = instance.capacities[instance.ends >= end].sum()
        scarce = np.flatnonzero(demand > alive)
        if len(scarce):
            prices[instance.ends >= end] += (end - until) * levels[scarce[-1]]
        until = end
    return prices
