"""Allocate the slots of nodes that jobs share: counts as in `solvers.counts`, jobs that stay where they are, and moves.

A job that keeps its number of slots may stay, or move to another node at a cost w_j. With x_jn = 1 if job j has n
slots, k_j = 1 if it keeps C_j slots where they are, P_i the jobs that have a part of node i, f_i the slots of node i,
and sizes d_r as in `planning.sizes`::

    max  sum_jn v_j(n) x_jn  -  sum_j w_j (x_jC_j - k_j)
    s.t. sum_n x_jn = 1,    k_j <= x_jC_j
         d_r y_ir + sum_{j in P_i} C_j k_j <= f_i                                          for each node i, size d_r
         sum_{j, n >= d_r} n x_jn  <=  sum_i d_r y_ir + sum_{j: C_j >= d_r} C_j k_j        for each size d_r
         x, k binary,  y integer

The last rows are the condition under which the jobs that do not stay fit beside those that do; y_ir is the number of
jobs of d_r slots for which node i has room. A job of whole nodes never needs to move, as nodes are alike.

The linear relaxation of the count model without all this bounds it from above, and its solution, rounded and repaired,
is a good one. Where that is no proof, the programme is solved over the counts that reduced-cost fixing leaves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import highspy
import numpy as np

from freetrain_parsl.planning.sizes import room, round_down, round_up, sizes_within, wanted
from freetrain_parsl.planning.solvers.counts import Relaxation, alike, relaxation
from freetrain_parsl.planning.solvers.highs import Counts, Programme, Solution, Table, make_solver

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Parts", "maximise_on_hosts", "most_valuable_stays"]

_UNITS = 1000.0  # the gap, in units of the programme's objective
_OPTIONS = {
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


@dataclass(frozen=True)
class Parts:
    """Nodes that jobs share, and the parts of them that jobs have, or would have.

    Parameters
    ----------
    slots
        A, slots of a node that has all of them.
    free
        f_i, slots of each node that are there, shape (H,).
    host
        Node of each job's part, shape (J,); -1 for a job without one.
    sizes
        Slots of the part, shape (J,).
    """

    slots: int
    free: Counts
    host: Counts
    sizes: Counts

    @property
    def all(self) -> Counts:
        """1 for each job that has a part, shape (J,)."""
        return (self.host >= 0).astype(np.int64)

    def left(self, stays: Counts) -> Counts:
        """Return the slots of each node that these parts leave, shape (H,)."""
        taken = np.zeros_like(self.free)
        there = stays > 0
        np.add.at(taken, self.host[there], self.sizes[there])
        return self.free - taken

    def fit(self, stays: Counts, counts: Counts) -> bool:
        """Return whether jobs of these counts can be placed so that the parts in `stays` remain."""
        left = self.left(stays)
        if (left < 0).any():
            return False
        others = np.where(stays > 0, counts - self.sizes, counts)
        return bool((wanted(others, self.slots) <= room(left, self.slots)).all())


def maximise_on_hosts(
    values: Table, incumbent: Counts, parts: Parts, move_costs: Table, *, time_limit: float = 1.0, gap: float = 0.0
) -> Solution:
    """Find counts of the highest value less the costs of moves.

    Parameters
    ----------
    values
        v_j(n), shape (J, N + 1) for N slots; minus infinity where a count is not allowed, see `planning.sizes`.
    incumbent
        Counts that can be placed with all `parts` of unchanged size; the result is never worth less.
    parts
        The parts of nodes that jobs have now.
    move_costs
        w_j, cost of moving a part to another node, shape (J,).
    time_limit, gap
        As in `counts.maximise_counts`.

    Raises
    ------
    PlanningError
        The solver failed.
    """
    deadline = time.perf_counter() + time_limit
    relaxed = relaxation(values)
    best, objective = incumbent, _worth(values, incumbent, parts, move_costs, parts.all * (incumbent == parts.sizes))
    placeable = _repaired(values, relaxed.counts, parts)
    stays = _stays(parts, placeable, move_costs, time_limit)
    if (worth := _worth(values, placeable, parts, move_costs, stays)) > objective:
        best, objective = placeable, worth
    prices = _prices(values, parts, relaxed)
    if prices.bound - objective <= max(gap, 1e-12) * abs(prices.bound):
        return Solution(best, objective, max(prices.bound, objective))
    programme = _Programme(values, parts, move_costs, prices, objective)
    counts, bound = programme.solve(best, max(deadline - time.perf_counter(), 0.0), gap)
    stays = _stays(parts, counts, move_costs, time_limit)
    if (worth := _worth(values, counts, parts, move_costs, stays)) > objective:
        best, objective = counts, worth
    return Solution(best, objective, max(min(bound, prices.bound), objective))


def _repaired(values: Table, counts: Counts, parts: Parts) -> Counts:
    """Lower counts that cannot be placed, at the least loss for each slot that is too many, then fill what is left."""
    slots, jobs = parts.slots, np.arange(len(counts))
    sizes = np.array(sizes_within(slots))
    there = room(parts.free, slots)
    best: Counts = counts.copy()
    while (excess := wanted(best, slots) - there).max() > 0:
        least = int(sizes[np.flatnonzero(excess > 0)[-1]])
        lower = np.array([round_down(max(count - 1, 0), slots) for count in best.tolist()])
        lower = np.where(np.isfinite(values[jobs, lower]), lower, 0)
        freed = best - np.where(lower >= least, lower, 0)
        loss = np.where(best >= least, (values[jobs, best] - values[jobs, lower]) / np.maximum(freed, 1), np.inf)
        row = int(np.argmin(loss))
        best[row] = lower[row]
    for _ in range(len(best)):
        higher = np.array([round_up(count + 1, slots) for count in best.tolist()])
        allowed = higher < values.shape[1]
        higher = np.where(allowed, higher, best)
        gain = np.where(allowed, values[jobs, higher] - values[jobs, best], -np.inf)
        for row in np.argsort(-gain, kind="stable")[:8].tolist():
            trial: Counts = best.copy()
            trial[row] = higher[row]
            if gain[row] > 0 and (wanted(trial, slots) <= there).all():
                best = trial
                break
        else:
            break
    return best


def _worth(values: Table, counts: Counts, parts: Parts, move_costs: Table, stays: Counts) -> float:
    moved = (parts.host >= 0) & (counts == parts.sizes) & (stays == 0)
    return float(values[np.arange(len(values)), counts].sum() - move_costs[moved].sum())


def _stays(parts: Parts, counts: Counts, move_costs: Table, time_limit: float) -> Counts:
    """Choose which of the jobs of unchanged size stay."""
    unchanged = replace(parts, host=np.where(counts == parts.sizes, parts.host, -1))
    return most_valuable_stays(unchanged, counts, move_costs, time_limit=time_limit)


def most_valuable_stays(parts: Parts, counts: Counts, weights: Table, *, time_limit: float = 1.0) -> Counts:
    """Choose the parts that remain where they are, of the highest total weight, so that all jobs can be placed.

    Parameters
    ----------
    parts
        What each job would keep: its count on one node, or a whole node of several.
    counts
        Decided slots of each job, shape (J,), which fit if none remains.
    weights
        Value of each part that remains, shape (J,), at least zero.
    time_limit
        Seconds after which the best choice so far is returned.

    Returns
    -------
    numpy.ndarray
        1 for each part that remains, shape (J,).
    """
    if parts.fit(parts.all, counts):
        return parts.all
    model = Programme()
    rows = np.flatnonzero(parts.all)
    model.add_columns(-weights[rows], np.ones(len(rows)), integer=True)
    remaining = [_Remaining(column, int(row), int(parts.sizes[row])) for column, row in enumerate(rows)]
    demand = [
        [(one.column, -float(one.size)) for one in remaining if counts[one.row] >= size > 1]
        for size in sizes_within(parts.slots)
    ]
    _add_room(model, parts, remaining, demand, wanted(counts, parts.slots))
    solver = make_solver({**_OPTIONS, "time_limit": time_limit})
    model.run(solver, np.concatenate([np.zeros(len(rows)), _room_of(parts, parts.all * 0)]))
    stays = np.zeros_like(counts)
    stays[rows] = np.rint(solver.getSolution().col_value[: len(rows)])
    return stays if parts.fit(stays, counts) else np.zeros_like(counts)


@dataclass(frozen=True)
class _Remaining:
    """A column with the number of `many` alike jobs whose part of `size` remains; `row` is one of them."""

    column: int
    row: int
    size: int
    many: int = 1


def _divided_hosts(parts: Parts) -> Counts:
    """Return the nodes of which jobs have parts."""
    return np.unique(parts.host[parts.host >= 0])


def _room_of(parts: Parts, stays: Counts) -> Table:
    """Return y_ir of the nodes of which jobs have parts, for sizes above 1, node by node."""
    left = parts.left(stays)[_divided_hosts(parts)]
    rooms: Table = (left[:, None] // np.array(sizes_within(parts.slots)[1:])).ravel().astype(float)
    return rooms


def _add_room(
    model: Programme,
    parts: Parts,
    remaining: Sequence[_Remaining],
    demand: Sequence[Sequence[tuple[int, float]]],
    fixed: Counts,
) -> None:
    """Add y, and the rows that compare it with the demand for each size: columns with coefficients, and a constant.

    y of the size 1 is what a node has left. Other sizes have stronger rows, too: a part that remains, however small,
    takes a whole place of size d if it begins one.
    """
    sizes = sizes_within(parts.slots)[1:]
    hosts = _divided_hosts(parts)
    on: dict[int, list[_Remaining]] = defaultdict(list)
    for one in remaining:
        on[int(parts.host[one.row])].append(one)
    most = np.repeat(parts.free[hosts], len(sizes)) // np.tile(sizes, len(hosts))
    first = model.add_columns(np.zeros(len(most)), most, integer=True)
    for number, host in enumerate(hosts.tolist()):
        taken = [(one.column, float(one.size)) for one in on[host]]
        for level, size in enumerate(sizes):
            free, column = int(parts.free[host]), first + number * len(sizes) + level
            _add(model, [(column, float(size)), *taken], float(free))
            for one in on[host]:
                if free % size < one.size < size:
                    _add(model, [(column, 1.0), (one.column, 1.0 / one.many)], float(free // size))
    elsewhere = room(np.delete(parts.free, hosts), parts.slots) - fixed
    _add(model, demand[0], float(parts.free.sum() - fixed[0]))
    for level, size in enumerate(sizes):
        given = [(first + number * len(sizes) + level, -float(size)) for number in range(len(hosts))]
        _add(model, [*demand[level + 1], *given], float(elsewhere[level + 1]))


def _add(model: Programme, terms: Sequence[tuple[int, float]], most: float) -> None:
    if terms:
        columns, coefficients = zip(*terms, strict=True)
        model.add_row(np.array(columns), np.array(coefficients), -np.inf, most)


@dataclass(frozen=True)
class _Prices:
    """A Lagrangian bound: jobs of at least `least` slots pay `price` for each slot of a `capacity`.

    Parameters
    ----------
    regrets
        What a count loses against the job's best one at this price, shape (J, N + 1).
    bound
        Upper bound on the value of any counts; less the regret of a count, on those with this count.
    """

    price: float
    least: int
    capacity: int
    regrets: Table
    bound: float


def _prices(values: Table, parts: Parts, relaxed: Relaxation) -> _Prices:
    """Return the tighter one of two bounds: slots are scarce, or whole nodes are, as some nodes lack slots."""
    of_slots = _Prices(relaxed.price, 1, values.shape[1] - 1, relaxed.regrets, relaxed.bound)
    whole = int((parts.free == parts.slots).sum())
    if whole == len(parts.free) or not whole:
        return of_slots
    small = values[:, : parts.slots].max(axis=1)
    in_nodes = np.column_stack([small, values[:, parts.slots :: parts.slots][:, :whole]])
    whole_nodes = relaxation(in_nodes)
    price, bound = whole_nodes.price, whole_nodes.bound
    if bound >= of_slots.bound:
        return of_slots
    counts = np.arange(values.shape[1])
    reduced = values - price / parts.slots * np.where(counts >= parts.slots, counts, 0)
    reduced[:, counts > whole * parts.slots] = -np.inf
    regrets = reduced.max(axis=1)[:, None] - reduced
    return _Prices(price / parts.slots, parts.slots, whole * parts.slots, regrets, bound)


class _Programme:
    """The programme over the counts that reduced-cost fixing leaves, in units of regret as in `solvers.counts`.

    Jobs with the same values and the same part of a node form a group, as there.
    """

    def __init__(self, values: Table, parts: Parts, move_costs: Table, prices: _Prices, known: float) -> None:
        self._parts, self._prices = parts, prices
        self._bound, regrets = prices.bound, prices.regrets
        self._gap = max(self._bound - known, 1e-12 * abs(self._bound))
        self._scale = _UNITS / self._gap
        tables = (row.tobytes() for row in values)
        self._groups = alike(zip(tables, parts.host.tolist(), parts.sizes.tolist(), move_costs, strict=True))
        self._counts = [np.flatnonzero(regrets[rows[0]] <= self._gap * (1 + 1e-9)) for rows in self._groups]
        self._regrets = [regrets[rows[0], at] for rows, at in zip(self._groups, self._counts, strict=True)]
        self._move_costs = move_costs

    def solve(self, start: Counts, time_limit: float, gap: float) -> tuple[Counts, float]:
        """Return counts, and an upper bound on the value of any."""
        model, columns, begin = self._build(start)
        absolute = max(1e-6, gap * abs(self._bound) * self._scale)
        solver = make_solver({**_OPTIONS, "time_limit": time_limit, "mip_abs_gap": absolute})
        model.run(solver, begin)
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return start, self._bound
        found = np.rint(solver.getSolution().col_value).astype(np.int64)
        counts = np.zeros_like(start)
        for rows, at, first in zip(self._groups, self._counts, columns, strict=True):
            each = chain.from_iterable(map(repeat, at.tolist(), found[first : first + len(at)].tolist()))
            counts[rows] = sorted(each, reverse=True)
        return counts, self._bound - float(np.clip(info.mip_dual_bound / self._scale, 0.0, self._gap))

    def _build(self, start: Counts) -> tuple[Programme, list[int], Table]:
        """Write the programme; return it, the first column of each group's counts, and where it begins."""
        parts, model = self._parts, Programme()
        begin: list[float] = []
        columns: list[int] = []
        remaining: list[_Remaining] = []
        demand: list[list[tuple[int, float]]] = [[] for _ in sizes_within(parts.slots)]
        used: list[tuple[int, float]] = []
        stays = _stays(parts, start, self._move_costs, 1.0)
        for rows, at, regrets in zip(self._groups, self._counts, self._regrets, strict=True):
            many, size = len(rows), int(parts.sizes[rows[0]])
            costs = regrets.copy()
            stay = parts.host[rows[0]] >= 0 and size in at
            if stay:
                costs[at == size] += self._move_costs[rows[0]]
            first = model.add_columns(costs * self._scale, np.full(len(at), many), integer=True)
            columns.append(first)
            begin += [float((start[rows] == count).sum()) for count in at]
            model.add_row(np.arange(first, first + len(at)), np.ones(len(at)), many, many)
            used += [(first + i, float(count)) for i, count in enumerate(at.tolist()) if count >= self._prices.least]
            for level, least in enumerate(sizes_within(parts.slots)):
                demand[level] += [(first + i, float(count)) for i, count in enumerate(at.tolist()) if count >= least]
            if not stay:
                continue
            column = model.add_columns(
                np.array([-self._move_costs[rows[0]] * self._scale]), np.array([many]), integer=True
            )
            begin.append(float(stays[rows].sum()))
            remaining.append(_Remaining(column, int(rows[0]), size, many))
            same = first + int(np.flatnonzero(at == size)[0])
            model.add_row(np.array([column, same]), np.array([1.0, -1.0]), -np.inf, 0.0)
            for level, least in enumerate(sizes_within(parts.slots)):
                if size >= least > 1:  # of single slots, what remains is in use like the rest
                    demand[level].append((column, -float(size)))
        capacity = self._prices.capacity
        idle = model.add_columns(np.array([self._prices.price * self._scale]), np.array([capacity]))
        begin.append(float(capacity - start[start >= self._prices.least].sum()))
        used = [(idle, 1.0), *((column, count) for column, count in used if count)]
        numbers, coefficients = zip(*used, strict=True)
        model.add_row(np.array(numbers), np.array(coefficients), capacity, capacity)
        _add_room(model, parts, remaining, demand, np.zeros(len(demand), dtype=np.int64))
        return model, columns, np.concatenate([begin, _room_of(parts, stays)])
