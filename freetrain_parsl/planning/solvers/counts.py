"""Allocate N interchangeable nodes at the highest total value, exactly: a dynamic programme, or HiGHS.

::

    max  sum_j v_j(n_j)      subject to      sum_j n_j <= N,      v_j any function of 0, 1, ..., N

One binary variable per trainer and count would be correct but slow. Instead:

1. The linear relaxation, over the upper concave envelope of every v_j, is solved first. The dual L of its one
   row bounds the optimum from above, for any v_j: ``L N + sum_j max_n (v_j(n) - L n)``. Sorting solves it.
2. Rounding its solution, which has at most one trainer between two true points of its envelope, gives an
   incumbent. Often it meets the bound and is thereby proven optimal.
3. If not, a count n of trainer j is in no better solution if its regret, ``max_m (v_j(m) - L m)`` less
   ``v_j(n) - L n``, exceeds the gap (reduced-cost fixing). The remaining counts are the core.
4. `least_regret` adds up the core, trainer by trainer. Unlike that of branch and bound, its time is known beforehand.
5. A core that is too large for it is a mixed-integer programme with one integer per piece on which v_j is concave, or
   none if only one piece is left, in units of regret: the optimum is the same, and the solver's tolerances are relative
   to the gap, not to the objective.

Dyer, Kayal & Walker (1984) and Pisinger (1995) treat the multiple-choice knapsack problem by such relaxations
and cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING

import highspy
import numpy as np

from freetrain_parsl.planning.solvers.highs import Counts, Programme, Solution, Table, make_solver

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

__all__ = [
    "ConcavePiece",
    "Relaxation",
    "alike",
    "fill",
    "least_regret",
    "maximise_counts",
    "pieces_of",
    "relaxation",
]

_ROUNDING = 1e-13  # of the largest value: smaller differences are rounding errors of the tables, not kinks
_CLOSED = 1e-12  # of the sum of largest values: a smaller gap counts as zero
_UNITS = 1000.0  # the gap, in units of the core's objective
_SAME = 1e-9  # of the gap: less is not a gain, as for HiGHS
_MOST_SUMS = 2_000_000  # of the dynamic programme: 10 to 60 ms


def maximise_counts(values: Table, incumbent: Counts, *, time_limit: float = 1.0, gap: float = 0.0) -> Solution:
    """Find counts of the highest total value; among trainers with equal v_j, the earlier get no fewer.

    Parameters
    ----------
    values
        v_j(n), shape (J, N + 1); minus infinity where a count is not allowed; v_j(0) is always finite.
    incumbent
        Allowed counts, at most N in total; the result is never worth less.
    time_limit
        Seconds after which the best counts so far are returned, with a bound.
    gap
        Stop at this distance from the bound, relative to it.

    Raises
    ------
    PlanningError
        The solver failed.
    """
    solution = _maximise(values, incumbent, time_limit, gap)
    return replace(solution, counts=_earlier_first(values, solution.counts))


def _earlier_first(values: Table, counts: Counts) -> Counts:
    counts = counts.copy()
    for rows in alike(table.tobytes() for table in values):
        counts[rows] = -np.sort(-counts[rows])
    return counts


def _maximise(values: Table, incumbent: Counts, time_limit: float, gap: float) -> Solution:
    deadline = time.perf_counter() + time_limit
    best, objective = incumbent, _total(values, incumbent)
    relaxed = relaxation(values)
    price, bound = relaxed.price, relaxed.bound
    if (total := _total(values, relaxed.counts)) > objective:
        best, objective = relaxed.counts, total
    scale = float(np.abs(values, where=np.isfinite(values), out=np.zeros_like(values)).max(axis=1).sum())
    if bound - objective <= max(gap * abs(bound), _CLOSED * scale):
        return Solution(best, objective, max(bound, objective))

    core = _Core(values, relaxed.regrets, price, bound - objective, _ROUNDING * scale / len(values))
    counts, loss = core.solve(best, max(deadline - time.perf_counter(), 0.0), gap * abs(bound))
    if (total := _total(values, counts)) > objective:
        best, objective = counts, total
    return Solution(best, objective, max(bound - loss, objective))


def _total(values: Table, counts: Counts) -> float:
    return float(values[np.arange(len(values)), counts].sum())


@dataclass(frozen=True)
class Relaxation:
    """The linear relaxation, and its solution rounded.

    Parameters
    ----------
    price
        L, price of a node.
    regrets
        Regret of each count at this price, shape (J, N + 1).
    bound
        Upper bound on the value of any counts.
    counts
        Counts of a high value, shape (J,).
    """

    price: float
    regrets: Table
    bound: float
    counts: Counts


def relaxation(values: Table) -> Relaxation:
    """Solve the linear relaxation of `maximise_counts`."""
    nodes = values.shape[1] - 1
    peaks = np.argmax(values, axis=1)
    if peaks.sum() <= nodes:  # enough nodes for all: without the shared row, this is the optimum
        tops = values.max(axis=1)
        return Relaxation(0.0, tops[:, None] - values, float(tops.sum()), peaks)
    price, start = _relax(values)
    reduced = values - price * np.arange(nodes + 1)
    tops = reduced.max(axis=1)
    counts = _earlier_first(values, _fill(values, start))
    return Relaxation(price, tops[:, None] - reduced, price * nodes + float(tops.sum()), counts)


_OPTIONS: Mapping[str, bool | float] = MappingProxyType(
    {
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
        "dual_feasibility_tolerance": 1e-9,
        # Searching for better starts costs 4 to 10 times what it saves.
        "mip_heuristic_run_rins": False,
        "mip_heuristic_run_rens": False,
        "mip_heuristic_run_root_reduced_cost": False,
    }
)


def _relax(values: Table) -> tuple[float, Counts]:
    """Solve the relaxation over concave envelopes; return the price of a node and counts at or below its solution.

    The counts are true points of the envelopes, whose peaks need more nodes than there are. With one shared row, the
    optimum takes the steepest segments first (Sinha and Zoltners, 1979); the price is the slope of the first that does
    not fit.
    """
    rows, nodes = len(values), values.shape[1] - 1
    known: dict[bytes, Counts] = {}  # many trainers have equal tables
    corners = [_remembered(known, row) for row in values]
    owner = np.repeat(np.arange(rows), [len(at) - 1 for at in corners])
    ends = np.concatenate([at[1:] for at in corners])
    lengths = np.concatenate([np.diff(at) for at in corners])
    slopes = np.concatenate([np.diff(values[row, at]) for row, at in enumerate(corners)]) / lengths
    order = np.argsort(-slopes, kind="stable")
    fitting = int(np.searchsorted(np.cumsum(lengths[order]), nodes, side="right"))
    taken = order[:fitting]
    counts = np.zeros(rows, dtype=np.int64)
    np.maximum.at(counts, owner[taken], ends[taken])
    return float(slopes[order[fitting]]), counts


def _remembered(known: dict[bytes, Counts], row: Table) -> Counts:
    """Return `_envelope` of a row; `known` are those of other rows, by their bytes."""
    key = row.tobytes()
    if (corners := known.get(key)) is None:
        corners = known[key] = _envelope(row)
    return corners


def _envelope(row: Table) -> Counts:
    """Return the corners of the upper concave envelope, up to its highest point, as counts."""
    at = np.flatnonzero(np.isfinite(row[: int(np.argmax(row)) + 1]))
    at = at[_kinks(at, row[at], upper=True)]
    counts, values = at.tolist(), row[at].tolist()
    hull: list[int] = []
    for i, (count, value) in enumerate(zip(counts, values, strict=True)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (values[b] - values[a]) * (count - counts[a]) > (value - values[a]) * (counts[b] - counts[a]):
                break
            hull.pop()
        hull.append(i)
    return at[hull]


def _kinks(at: Counts, values: Table, *, upper: bool = False) -> Counts:
    """Return the positions in `at` where a function is not linear, including ends; only downward kinks if `upper`."""
    if len(at) <= 2:
        return np.arange(len(at))
    slopes = np.diff(values) / np.diff(at)
    bends = np.diff(slopes)
    tolerance = _ROUNDING * float(np.abs(values).max())
    inner = np.flatnonzero(bends < -tolerance if upper else np.abs(bends) > tolerance) + 1
    kinks = np.concatenate([[0], inner, [len(at) - 1]])
    if not upper:
        error = np.abs(np.interp(at, at[kinks], values[kinks]) - values).max()
        if error > 10 * tolerance:  # many bends, each as small as rounding: keep every point
            return np.arange(len(at))
    return kinks


def _fill(values: Table, counts: Counts) -> Counts:
    """Give the remaining nodes to one trainer after another, largest gain first."""
    counts = counts.copy()
    rows, nodes = len(values), values.shape[1] - 1
    # A few rounds come close; the core does the rest.
    for _ in range(4):
        left = nodes - int(counts.sum())
        if left == 0:
            break
        now = values[np.arange(rows), counts]
        gains = np.zeros(rows)
        chosen = counts.copy()
        for row in range(rows):
            best = counts[row] + int(np.argmax(values[row, counts[row] : counts[row] + left + 1]))
            chosen[row], gains[row] = best, values[row, best] - now[row]
        winner = int(np.argmax(gains))
        if gains[winner] <= 0:
            break
        counts[winner] = chosen[winner]
    return counts


@dataclass
class ConcavePiece:
    """A range of counts on which a value is concave, offered to each trainer of a group.

    Parameters
    ----------
    corners, losses
        Counts between which the loss, which is to be minimised, is linear, and the loss there.
    column
        Variable: how many trainers are on it; -1 if they have no choice.
    """

    corners: Counts
    losses: Table
    column: int = -1

    def add_to(
        self, model: Programme, many: int, here: Counts, scale: float, *, choice: bool = True
    ) -> tuple[list[float], list[tuple[int, float]]]:
        """Add its variables for `many` trainers to a programme, of which those with the counts `here` begin on it.

        Returns
        -------
        tuple
            Where the variables begin, and pairs of a variable and the nodes that it stands for.
        """
        start: list[float] = []
        used: list[tuple[int, float]] = []
        lengths = np.diff(self.corners)
        if choice:
            self.column = model.add_columns(self.losses[:1] * scale, np.array([many]), integer=True)
            start.append(len(here))
            used.append((self.column, float(self.corners[0])))
        if len(lengths):
            slopes = np.diff(self.losses) / lengths
            first = model.add_columns(slopes * scale, many * lengths)
            start.extend(np.clip(here[:, None] - self.corners[:-1], 0, lengths).sum(axis=0))
            segments = range(first, first + len(lengths))
            used.extend((column, 1.0) for column in segments)
            for column, length in zip(segments, lengths, strict=True) if choice else ():
                model.add_row(np.array([column, self.column]), np.array([1.0, -length]), -np.inf, 0.0)
        return start, used


class _Core:
    """The core that reduced-cost fixing leaves, in units of regret.

    Trainers with equal values form a group, and the variables are how many of them are on each piece:
    otherwise the solver would have to prove the same for each of their permutations.

    Parameters
    ----------
    values, losses
        v_j(n) and its regret at the price, shape (J, N + 1).
    price
        Price of a node, in units of value.
    gap
        Difference of the bound and the incumbent's value.
    noise
        Tolerance for rounding: regrets up to this much above the gap are still in the core.
    """

    def __init__(self, values: Table, losses: Table, price: float, gap: float, noise: float) -> None:
        self.values = values
        self.nodes = values.shape[1] - 1
        self.price, self.gap = price, gap
        self.groups = alike(table.tobytes() for table in values)
        self.losses, self.limit = losses, gap * (1 + 1e-9) + noise
        self.choices = [np.flatnonzero(row <= self.limit) for row in losses]
        self.pieces: list[list[ConcavePiece]] = []

    def solve(self, incumbent: Counts, time_limit: float, gap: float) -> tuple[Counts, float]:
        """Minimise the regret; return the counts and a lower bound on the regret."""
        cores = [(at, row[at]) for at, row in zip(self.choices, self.losses, strict=True)]
        found = least_regret(cores, self.nodes, self.price, self.limit, most=_MOST_SUMS)
        if found is not None:
            counts, regret = found
            return counts if regret < self.gap * (1 - _SAME) else incumbent, min(regret, self.gap)
        self.pieces = [pieces_of(self.choices[rows[0]], self.losses[rows[0]]) for rows in self.groups]
        scale = _UNITS / self.gap
        model, start = self._build(incumbent, scale)
        solver = make_solver({**_OPTIONS, "time_limit": time_limit, "mip_abs_gap": max(1e-6, gap * scale)})
        status = model.run(solver, start)
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return incumbent, 0.0
        if any(len(pieces) > 1 for pieces in self.pieces):
            bound = info.mip_dual_bound
        else:
            bound = info.objective_function_value if status == highspy.HighsModelStatus.kOptimal else 0.0
        counts = self._polish(np.asarray(solver.getSolution().col_value))
        return counts, float(np.clip(bound / scale, 0.0, self.gap))

    def _build(self, incumbent: Counts, scale: float) -> tuple[Programme, Table]:
        """Write the programme, and the incumbent as its start."""
        model = Programme()
        start: list[float] = []
        used: list[tuple[int, float]] = []  # (column, nodes) of the shared row
        fixed = 0
        for rows, pieces in zip(self.groups, self.pieces, strict=True):
            many, choice = len(rows), len(pieces) > 1
            homes = [next(k for k, p in enumerate(pieces) if n <= p.corners[-1]) for n in incumbent[rows]]
            for k, piece in enumerate(pieces):
                here = np.array([n for n, home in zip(incumbent[rows], homes, strict=True) if home == k])
                begins, uses = piece.add_to(model, many, here, scale, choice=choice)
                start += begins
                used += uses
                if not choice:
                    fixed += many * int(piece.corners[0])
                    model.offset += many * float(piece.losses[0]) * scale
            if choice:
                model.add_row(np.array([p.column for p in pieces]), np.ones(len(pieces)), many, many)
        # Idle nodes cost their price, so a number of them whose cost exceeds the gap is in no better solution than the
        # incumbent. The incumbent itself must be feasible despite rounding of its gap.
        idle_now = self.nodes - int(incumbent.sum())
        idle = min(self.nodes, int(self.gap * (1 + 1e-9) / self.price)) if self.price > 0 else self.nodes
        used.append((model.add_columns(np.array([self.price * scale]), np.array([max(idle, idle_now)])), 1.0))
        start.append(float(idle_now))
        columns, coefficients = zip(*used, strict=True)
        rest = self.nodes - fixed
        model.add_row(np.array(columns), np.array(coefficients, dtype=float), rest, rest)
        return model, np.array(start, dtype=float)

    def _polish(self, solution: Table) -> Counts:
        """Fill the chosen pieces exactly: they are concave, so the steepest segments come first."""
        chosen: dict[int, ConcavePiece] = {}
        for rows, pieces in zip(self.groups, self.pieces, strict=True):
            many = [len(rows)] if len(pieces) == 1 else [round(solution[piece.column]) for piece in pieces]
            chosen.update(zip(rows.tolist(), chain.from_iterable(map(repeat, pieces, many)), strict=True))
        counts = np.zeros(len(self.values), dtype=np.int64)
        segments: list[tuple[float, int, int]] = []
        for row, piece in chosen.items():
            counts[row] = piece.corners[0]
            lengths = np.diff(piece.corners)
            gains = np.diff(self.values[row, piece.corners]) / lengths
            segments.extend(zip((-gains).tolist(), repeat(row), lengths.tolist()))
        fill(counts, segments, [0] * len(counts), [self.nodes - int(counts.sum())])
        return counts


def fill(counts: Counts, segments: list[tuple[float, int, int]], pools: Sequence[int], left: list[int]) -> None:
    """Add the steepest segments (loss per node, row, nodes) to the counts while nodes are left in the rows' pools."""
    for loss, row, length in sorted(segments):
        if loss >= 0:
            break
        take = min(max(left[pools[row]], 0), length)
        counts[row] += take
        left[pools[row]] -= take


def least_regret(
    cores: Sequence[tuple[Counts, Table]], nodes: int, price: float, limit: float, *, most: int
) -> tuple[Counts, float] | None:
    """Return counts of the least regret in the core, and that regret, by a dynamic programme.

    It keeps, for each number of nodes that the trainers so far can use together, their least regret. Regrets are never
    negative, so that sums beyond a known one are dropped at once: what is left lies close to the relaxation.

    Parameters
    ----------
    cores
        The counts that each trainer may have, ascending, and their regrets.
    nodes, price
        N and L: an idle node costs its price.
    limit
        A known regret: solutions with more are left out.
    most
        How many sums it may form.

    Returns
    -------
    tuple or None
        ``None`` if it would form more sums, or if rounding leaves no solution.
    """
    first, losses = 0, np.zeros(1)  # what trainers so far can use together: `first`, `first` + 1, ... nodes
    steps: list[tuple[int, Counts]] = []  # of each trainer: the first sum, and its choice for each sum
    for counts, regrets in cores:
        low, reach = int(counts[0]), int(counts[-1] - counts[0])
        sums = min(len(losses) + reach, nodes - first - low + 1)
        most -= len(counts) * sums
        if most < 0 or sums <= 0:
            return None
        padded = np.full(len(losses) + 2 * reach, np.inf)
        padded[reach : reach + len(losses)] = losses
        totals = padded[np.arange(reach, reach + sums) - (counts - low)[:, None]] + regrets[:, None]
        choices = totals.argmin(axis=0)
        losses = totals[choices, np.arange(sums)]
        kept = np.flatnonzero(losses <= limit)
        if not len(kept):
            return None
        first, here = first + low + int(kept[0]), slice(int(kept[0]), int(kept[-1]) + 1)
        losses = losses[here]
        steps.append((first, counts[choices[here]]))
    ends = losses + price * (nodes - first - np.arange(len(losses)))
    used = first + int(ends.argmin())
    found = np.zeros(len(cores), dtype=np.int64)
    for row in range(len(cores) - 1, -1, -1):
        begin, chosen = steps[row]
        found[row] = chosen[used - begin]
        used -= int(found[row])
    return found, float(ends.min())


def alike(keys: Iterable[Hashable]) -> list[Counts]:
    """Group the rows whose keys are equal, in order."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return [np.array(rows) for rows in groups.values()]


def pieces_of(inside: Counts, losses: Table) -> list[ConcavePiece]:
    """Split counts into ranges without gaps on which the loss is convex."""
    pieces: list[ConcavePiece] = []
    for run in np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1):
        corners = run[_kinks(run, losses[run])]
        slopes = np.diff(losses[corners]) / np.diff(corners)
        falls = np.flatnonzero(np.diff(slopes) < 0) + 1
        # Where the slope decreases, one piece ends and another begins, both including that count.
        edges = [0, *falls.tolist(), len(corners) - 1] if len(corners) > 1 else [0, 0]
        for first, last in pairwise(edges):
            part = corners[first : last + 1]
            pieces.append(ConcavePiece(part, losses[part]))
    return pieces
