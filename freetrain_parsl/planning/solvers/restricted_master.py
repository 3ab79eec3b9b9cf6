"""Columns, that is, trainers' choices of nodes, and the linear and integer programmes over the known columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import highspy
import numpy as np

from freetrain_parsl.planning.solvers.highs import make_solver, solve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.planning.solvers.window_model import Counts, Table, WindowInstance

__all__ = ["Columns", "Master", "choose_greedily", "choose_optimally"]

_UNITS = 1000.0  # the objective's scale, for the solver's absolute tolerances


class Columns:
    """Choices of trainers without duplicates, for a number of classes of nodes."""

    def __init__(self, classes: int) -> None:
        self.rows: Counts = np.empty(0, dtype=np.int64)
        self.counts: Counts = np.empty((0, classes), dtype=np.int64)
        self.values: Table = np.empty(0)
        self._known: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Counts, counts: Counts, values: Table) -> None:
        """Add the choices that are new and have a finite value."""
        new: list[int] = []
        for index, (row, choice) in enumerate(zip(rows.tolist(), counts, strict=True)):
            key = (row, choice.tobytes())
            if key not in self._known and values[index] > -np.inf:
                self._known[key] = len(self.rows) + len(new)
                new.append(index)
        self.rows = np.concatenate([self.rows, rows[new]])
        self.counts = np.concatenate([self.counts, counts[new]])
        self.values = np.concatenate([self.values, values[new]])

    def find(self, rows: Counts, counts: Counts) -> Counts:
        """Return the indices of known choices."""
        pairs = zip(rows.tolist(), counts, strict=True)
        return np.array([self._known[row, choice.tobytes()] for row, choice in pairs], dtype=np.int64)

    def losses(self, prices: Table, trainers: int) -> Table:
        """Return how much less each choice is worth at these prices than the best of its trainer."""
        reduced = self.values - self.counts @ prices
        tops = np.full(trainers, -np.inf)
        np.maximum.at(tops, self.rows, reduced)
        losses: Table = tops[self.rows] - reduced
        return losses


class Master:
    """The linear programme: fractions of columns that add up to one for each trainer.

    `scale` is the approximate size of its optimum.
    """

    def __init__(self, instance: WindowInstance, scale: float) -> None:
        self._trainers, self._classes = instance.current.shape
        self._unit = scale / _UNITS
        self._solver = _empty_programme(instance, {})
        self._passed = 0
        self._fixed: list[int] = []

    def solve(self, columns: Columns) -> tuple[float, Table, Table]:
        """Return the optimum over the columns, the dual price of a node of each class, and the columns' fractions."""
        _add(self._solver, columns, np.arange(self._passed, len(columns)), -columns.values / self._unit)
        self._passed = len(columns)
        solve(self._solver)
        solution = self._solver.getSolution()
        duals = np.array(solution.row_dual[self._trainers : self._trainers + self._classes])
        objective = self._solver.getInfo().objective_function_value
        fractions = np.array(solution.col_value[-len(columns) :])
        return -objective * self._unit, np.maximum(-duals, 0.0) * self._unit, fractions

    def fix(self, columns: Iterable[int]) -> None:
        """Fix these columns at one."""
        first = self._solver.getNumCol() - self._passed
        for column in columns:
            self._solver.changeColBounds(first + column, 1.0, 1.0)
        self._fixed.extend(columns)

    def release(self) -> None:
        """Unfix all columns."""
        first = self._solver.getNumCol() - self._passed
        for column in self._fixed:
            self._solver.changeColBounds(first + column, 0.0, 1.0)
        self._fixed.clear()


def choose_greedily(instance: WindowInstance, columns: Columns, prices: Table) -> Counts:
    """Give each trainer the fitting column of least regret, in order of decreasing gain.

    A trainer gets no nodes if its columns need more than is left.
    """
    trainers, classes = instance.current.shape
    losses = columns.losses(prices, trainers)
    chosen = np.zeros((trainers, classes), dtype=np.int64)
    without = np.zeros(trainers)
    empty = ~columns.counts.any(axis=1)
    without[columns.rows[empty]] = losses[empty]
    order = np.lexsort((losses, columns.rows))
    parts = np.split(order, np.searchsorted(columns.rows[order], np.arange(1, trainers)))
    free, unopened = instance.capacities.copy(), instance.is_offered.copy()
    blocks = instance.blocks
    for trainer in np.argsort(-without, kind="stable").tolist():
        counts = columns.counts[parts[trainer]]
        opens = np.count_nonzero((counts > 0) & unopened, axis=1)
        fits = np.all(counts <= free, axis=1) & (opens <= blocks)
        if fits.any():
            first = int(np.argmax(fits))
            chosen[trainer] = counts[first]
            free -= counts[first]
            blocks -= int(opens[first])
            unopened &= counts[first] == 0
    return chosen


def choose_optimally(
    instance: WindowInstance,
    columns: Columns,
    losses: Table,
    room: float,
    incumbent: Counts,
    *,
    time_limit: float,
    target: float,
) -> Counts:
    """Choose one column per trainer, of the highest total value, among those with a regret of at most `room`.

    `losses` are the columns' regrets at the best prices, and `room` is the difference of the bound and the value of the
    incumbent, whose columns are known. The solver stops at the value `target`. Without better counts, the incumbent is
    returned.
    """
    kept = np.flatnonzero(losses <= room * (1 + 1e-9))
    tops = np.full(len(incumbent), -np.inf)
    np.maximum.at(tops, columns.rows[kept], columns.values[kept])
    limits = {"time_limit": time_limit, "objective_target": (float(tops.sum()) - target) * _UNITS / room}
    solver = _empty_programme(instance, limits)
    fixed = solver.getNumCol()
    _add(solver, columns, kept, (tops[columns.rows] - columns.values) * (_UNITS / room))
    everything = np.arange(fixed + len(kept), dtype=np.int32)
    solver.changeColsIntegrality(
        len(everything), everything, np.full(len(everything), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
    )
    start = highspy.HighsSolution()
    used = np.all(columns.counts[kept] == incumbent[columns.rows[kept]], axis=1)
    opened = incumbent.sum(axis=0)[_limited(instance)] > 0
    start.col_value = [*opened.astype(float), *used.astype(float)]
    solver.setSolution(start)
    solve(solver)
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return incumbent
    taken = kept[np.asarray(solver.getSolution().col_value)[fixed:] > 0.5]
    chosen = np.zeros_like(incumbent)
    chosen[columns.rows[taken]] = columns.counts[taken]
    return chosen


def _limited(instance: WindowInstance) -> Counts:
    """Return the classes that need a variable: the offered ones, unless all of them may be used."""
    offered = np.flatnonzero(instance.is_offered & (instance.capacities > 0))
    return offered if len(offered) > instance.blocks else offered[:0]


def _empty_programme(instance: WindowInstance, options: Mapping[str, bool | float]) -> highspy.Highs:
    """Build the rows (one per trainer, one per class, possibly one for the blocks) and a variable for each block."""
    solver = make_solver(options)
    trainers, classes = instance.current.shape
    limited = _limited(instance)
    sizes = instance.capacities.astype(float)
    sizes[limited] = 0.0
    lower = np.concatenate([np.ones(trainers), np.full(classes + 1, -np.inf)])
    upper = np.concatenate([np.ones(trainers), sizes, [instance.blocks]])
    none = np.empty(0, dtype=np.int32)
    solver.addRows(len(lower), lower, upper, 0, none, none, np.empty(0))
    rows = np.stack([trainers + limited, np.full(len(limited), trainers + classes)], axis=1)
    entries = np.stack([-instance.capacities[limited], np.ones(len(limited))], axis=1)
    solver.addCols(
        len(limited),
        np.zeros(len(limited)),
        np.zeros(len(limited)),
        np.ones(len(limited)),
        2 * len(limited),
        2 * np.arange(len(limited), dtype=np.int32),
        rows.ravel().astype(np.int32),
        entries.ravel().astype(float),
    )
    return solver


def _add(solver: highspy.Highs, columns: Columns, which: Counts, costs: Table) -> None:
    """Add columns to a programme."""
    trainers = solver.getNumRow() - columns.counts.shape[1] - 1
    counts = columns.counts[which]
    entries = np.concatenate([np.ones((len(which), 1)), counts], axis=1)
    rows = np.concatenate(
        [columns.rows[which, None], np.broadcast_to(trainers + np.arange(counts.shape[1]), counts.shape)], axis=1
    )
    used = entries > 0
    starts = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    solver.addCols(
        len(which),
        costs[which],
        np.zeros(len(which)),
        np.ones(len(which)),
        int(starts[-1]),
        starts[:-1].astype(np.int32),
        rows[used].astype(np.int32),
        entries[used],
    )
