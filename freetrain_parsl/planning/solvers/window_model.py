"""Nodes in classes with different closing times: the window-aware model, and the value of counts in it.

::

    max  sum_j V_j(n_j)      subject to      sum_j n_jk <= s_k,      used offered classes <= max_blocks

n_jk nodes of class k go to trainer j. Class k closes at tau_k; those that close at or after the horizon T never do.
The instants 0 < t_1 < t_2 < ... < T (closings, and the end of the start-up of blocks opened now) divide the time
into intervals of lengths D_i, in which a_ji nodes of trainer j are alive: those of classes that have not closed,
and of offered classes only after the start-up. Then::

    V_j = sum_i D_i O_j(a_ji)  -  change_j  -  sum over closings with n_jk > 0 of c_k (down_j + checkpoint_j) O_j(a_ji)

where a_ji in the last term is the number of nodes just before the closing, with one term regardless of how many nodes
leave, and c_k is one for classes that close before T and zero for the rest. Other c_k may be given: less than one if
the future is discounted, or if a closing is only likely. Classes of the same time and c close together; at the same
time, the largest c closes first. ::

    change_j = up_j O_j(C_j)     if a class grows and the trainer runs,
               down_j O_j(C_j)   if none grows and one shrinks,
               start_j O_j(n_j)  if the trainer had no nodes and gets n_j

and moving_j O_j(C_j) more, times the share of a sharded state that the change from C_j to n_j moves (`moved_shares`).

C_j is the trainer's previous count, or the nearest allowed one. The total n_j must be zero or an allowed count. If
closings (or a block that has not started yet) leave the trainer with a count that is not allowed, it earns nothing.

With one class that never closes this is the count model of `freetrain_parsl.planning.solvers.counts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.model import moved_shares

__all__ = ["WindowInstance", "evaluate", "trainer_values"]

Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class WindowInstance:
    """Trainers and classes of nodes, in arrays.

    Parameters
    ----------
    rates
        O_j(n), value per second, shape (J, N + 1); NaN or minus infinity where a count is not allowed, zero on zero
        nodes. It must include every trainer's current count, or the nearest allowed one.
    up, down, start, checkpoint
        Seconds lost when a trainer grows, shrinks, starts, and saves before a closing; shape (J,).
    current
        C_jk, current nodes of the trainers, shape (J, K).
    sizes
        s_k, nodes of the classes, shape (K,).
    closings
        tau_k, seconds from now, positive, infinity if unknown; shape (K,).
    horizon
        T, seconds.
    shares
        c_k, weight of the cost of a closing, from 0 to 1, shape (K,). ``None``: as above.
    offered
        Whether a class is a window in which a block would have to be opened, shape (K,); otherwise its nodes are held.
        ``None``: all are held.
    startup
        Seconds until an opened block is usable.
    min_useful
        Minimum useful seconds of a block after its start-up; shorter windows are not used.
    max_blocks
        Maximum number of offered classes used; ``None`` for no limit.
    moving
        Seconds in which the whole of a sharded state could be moved, shape (J,). ``None``: none is sharded.

    Raises
    ------
    PlanningError
        Inconsistent shapes, times that are not positive, or more nodes in use than exist.
    """

    rates: Table
    up: Table
    down: Table
    start: Table
    checkpoint: Table
    current: Counts
    sizes: Counts
    closings: Table
    horizon: float
    shares: Table | None = None
    offered: Mask | None = None
    startup: float = 0.0
    min_useful: float = 0.0
    max_blocks: int | None = None
    moving: Table | None = None

    def __post_init__(self) -> None:
        trainers, classes = self.current.shape
        shapes = dict.fromkeys(("up", "down", "start", "checkpoint"), (trainers,))
        shapes |= {"sizes": (classes,), "closings": (classes,)}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise PlanningError(f"window model: {name} has shape {getattr(self, name).shape}, expected {shape}")
        if self.shares is not None and not (self.shares.shape == (classes,) and np.all(abs(2 * self.shares - 1) <= 1)):
            raise PlanningError("window model: shares must have one value from 0 to 1 per class")
        if len(self.rates) != trainers or (self.offered is not None and self.offered.shape != (classes,)):
            raise PlanningError("window model: expected one row of rates per trainer and one flag `offered` per class")
        if not (self.horizon > 0 and np.all(self.closings > 0)):
            raise PlanningError("window model: horizon and closings must be positive seconds from now")
        if np.any(self.current < 0) or np.any(self.current.sum(axis=0) > np.where(self.is_offered, 0, self.sizes)):
            raise PlanningError("window model: trainers have more nodes of a class than are held")
        if self.totals.max(initial=0) >= self.rates.shape[1]:
            raise PlanningError("window model: rates do not cover the trainers' current counts")

    @cached_property
    def is_offered(self) -> Mask:
        """Whether a class is offered, shape (K,)."""
        return np.zeros(len(self.sizes), dtype=bool) if self.offered is None else self.offered

    @cached_property
    def ends(self) -> Table:
        """Closings, at most the horizon, shape (K,)."""
        return np.minimum(self.closings, self.horizon)

    @cached_property
    def counted(self) -> Table:
        """c_k, shape (K,)."""
        return (self.closings < self.horizon).astype(np.float64) if self.shares is None else self.shares

    @cached_property
    def capacities(self) -> Counts:
        """Nodes that may be allocated, shape (K,): zero for an offered class that is not worth a block."""
        late = self.closings - self.startup
        useless = self.is_offered & ((late < self.min_useful) | (late <= 0))
        capacities: Counts = np.where(useless, 0, self.sizes)
        return capacities

    @cached_property
    def blocks(self) -> int:
        """How many offered classes may be used."""
        offered = int(np.count_nonzero(self.is_offered & (self.capacities > 0)))
        return offered if self.max_blocks is None else min(offered, self.max_blocks)

    @cached_property
    def allowed(self) -> Mask:
        """Which total counts a trainer may have, shape (J, N + 1); zero is always allowed."""
        allowed = np.isfinite(self.rates)
        allowed[:, 0] = True
        return allowed

    @cached_property
    def earned(self) -> Table:
        """Value per second on any number of nodes alive, shape (J, N + 1); zero where the count is not allowed."""
        earned = np.where(self.allowed, self.rates, 0.0)
        earned[:, 0] = 0.0
        return earned

    @cached_property
    def totals(self) -> Counts:
        """C_j, shape (J,)."""
        totals: Counts = self.current.sum(axis=1)
        return totals

    @cached_property
    def before(self) -> Table:
        """O_j at C_j or the nearest allowed count; zero for a trainer without nodes; shape (J,)."""
        before = np.zeros(len(self.rates))
        for row in np.flatnonzero(self.totals):
            counts = np.flatnonzero(self.allowed[row, 1:]) + 1
            if len(counts):
                before[row] = self.earned[row, counts[np.argmin(np.abs(counts - self.totals[row]))]]
        return before

    @cached_property
    def moved(self) -> Table | None:
        """Seconds in which a change to each count moves the shards of a running trainer, shape (J, N + 1)."""
        if self.moving is None or not self.moving.any():
            return None
        counts = np.arange(self.rates.shape[1])
        shares = np.stack([moved_shares(total, counts) for total in self.totals.tolist()])
        return self.moving[:, None] * shares

    @cached_property
    def growing_costs_more(self) -> bool:
        """Whether no running trainer grows more cheaply than it shrinks."""
        return bool(np.all((self.up >= self.down) | (self.totals == 0)))

    @cached_property
    def status_quo(self) -> Counts:
        """The current counts, zero for a trainer that cannot continue on its remaining nodes; shape (J, K)."""
        stays = self.allowed[np.arange(len(self.rates)), self.totals]
        counts: Counts = np.where(stays[:, None], self.current, 0)
        return counts

    def merged(self) -> tuple[WindowInstance, Counts]:
        """Merge held classes with the same end and share without loss of optimality; also return each class's index.

        Classes that close at the horizon or later have the same end. If some trainer grows more cheaply than it
        shrinks, it may swap nodes between such classes, and none are merged.
        """
        alone = 1 + np.arange(len(self.sizes))
        apart = np.where(self.is_offered | (not self.growing_costs_more), alone, 0)
        keys = np.stack([self.ends, self.counted, apart], axis=1)
        _, first, number = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        number = number.reshape(-1)
        merge = (number[:, None] == np.arange(len(first))).astype(np.int64)
        small = replace(
            self,
            current=self.current @ merge,
            sizes=self.sizes @ merge,
            closings=self.closings[first],
            shares=self.counted[first],
            offered=self.is_offered[first],
        )
        return small, number

    def divided(self, counts: Counts, number: Counts) -> Counts:
        """Divide counts of the merged problem: trainers keep their nodes, and all prefer the latest closings."""
        divided = np.zeros_like(self.current)
        order = np.lexsort((np.arange(len(number)), -self.closings))
        wanted, free = counts.copy(), self.sizes.copy()
        for have in (self.current, np.broadcast_to(self.sizes, self.current.shape)):
            for index in order:
                for row in np.flatnonzero(wanted[:, number[index]] * have[:, index]):
                    take = min(int(wanted[row, number[index]]), int(have[row, index]), int(free[index]))
                    divided[row, index] += take
                    wanted[row, number[index]] -= take
                    free[index] -= take
        return divided

    def feasible(self, counts: Counts) -> bool:
        """Return whether the classes are large enough, the blocks not too many, and every total is allowed."""
        used = counts.sum(axis=0)
        return bool(
            counts.shape == self.current.shape
            and np.all(counts >= 0)
            and np.all(used <= self.capacities)
            and np.count_nonzero(self.is_offered & (used > 0)) <= self.blocks
            and np.isfinite(trainer_values(self, np.arange(len(counts)), counts)).all()
        )


def trainer_values(instance: WindowInstance, rows: Counts, counts: Counts) -> Table:
    """Return V_j of choices of nodes, one at a time: minus infinity where the total is not allowed.

    Parameters
    ----------
    instance
        The problem.
    rows
        PlannedJob of each choice, shape (R,).
    counts
        Nodes of each class, shape (R, K).
    """
    total = counts.sum(axis=1)
    top = instance.rates.shape[1] - 1
    fits = (total <= top) & instance.allowed[rows, np.minimum(total, top)]
    marks = {0.0, instance.horizon, *instance.ends.tolist()}
    if instance.is_offered.any() and instance.startup < instance.horizon:
        marks.add(instance.startup)
    times = np.array(sorted(marks))
    there = instance.ends[:, None] >= times[1:]
    there &= ~instance.is_offered[:, None] | (times[:-1] >= instance.startup)
    alive = np.minimum(counts @ there, top)
    rates = instance.earned[rows[:, None], alive]
    values: Table = rates @ np.diff(times)

    ends, shares = instance.ends, instance.counted
    for end, share in {*zip(ends.tolist(), shares.tolist(), strict=True)}:
        if share > 0:
            leaves = counts[:, (ends == end) & (shares == share)].any(axis=1)
            left = (ends > end) | ((ends == end) & (shares <= share))
            left &= ~instance.is_offered | (end > instance.startup)
            alive = np.minimum(counts @ left, top)
            lost = share * (instance.down + instance.checkpoint)[rows] * instance.earned[rows, alive]
            values -= np.where(leaves, lost, 0.0)

    change = counts - instance.current[rows]
    grows, shrinks = np.any(change > 0, axis=1), np.any(change < 0, axis=1)
    seconds = np.where(grows, instance.up[rows], np.where(shrinks, instance.down[rows], 0.0))
    if instance.moved is not None:
        seconds += np.where(grows | shrinks, instance.moved[rows, np.minimum(total, top)], 0.0)
    values -= seconds * instance.before[rows]
    starts = grows & (instance.totals[rows] == 0)
    values -= np.where(starts, instance.start[rows] * instance.earned[rows, np.minimum(total, top)], 0.0)
    values[~fits] = -np.inf
    return values


def evaluate(instance: WindowInstance, counts: Counts) -> float:
    """Return the total value of counts, shape (J, K); minus infinity if a trainer may not have its total."""
    return float(trainer_values(instance, np.arange(len(counts)), counts).sum())
