"""Assign each training to at most one site, and divide the nodes of every site: an exact programme, in HiGHS.

::

    max  sum_j v_js(j)(n_j)    subject to    sum_{j: s(j) = s} n_j <= N_s  for every site s,    v_js any function

A function v_js is split where its slope increases, into pieces on which it is concave. Per training, site and piece
there is one binary w, worth the value at the piece's first corner, and per segment of the piece its nodes e, at most
its length times w, worth the slope: on a concave piece the steepest segments fill first by themselves. As capacities
and corners are integers, so are the e of a vertex for given w; they need not be integer variables. Trainings with equal
values are a group, and w is how many of them are on a piece: the solver need not prove the same for each permutation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING

import highspy
import numpy as np
import numpy.typing as npt

from freetrain_parsl.planning.solvers.highs import make_solver, solve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NOWHERE", "SiteAssignment", "assign_sites"]

Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

NOWHERE = -1
"""The site of a training that gets no nodes."""

_ROUNDING = 1e-12  # of the largest value: smaller changes of a slope are rounding errors
_LARGEST = 1000.0  # largest value in the solver's objective: its tolerances are absolute
_OPTIONS: Mapping[str, bool | float] = MappingProxyType(
    {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
)


@dataclass(frozen=True)
class SiteAssignment:
    """Sites, counts and their quality.

    Parameters
    ----------
    sites
        Site of each training, or `NOWHERE`, shape (J,).
    counts
        Nodes of each training there, shape (J,).
    objective
        Their total value.
    bound
        Upper bound on the total value of any assignment.
    """

    sites: Counts
    counts: Counts
    objective: float
    bound: float


@dataclass
class _Piece:
    """A range of counts at a site on which a value is concave."""

    site: int
    corners: Counts
    values: Table
    column: int = 0  # how many trainings are on it; the columns of its segments follow


def assign_sites(
    values: Sequence[Sequence[Table]],
    capacity: Sequence[int],
    incumbent: tuple[Counts, Counts],
    *,
    time_limit: float = 1.0,
) -> SiteAssignment:
    """Find the assignment of the highest total value.

    Parameters
    ----------
    values
        v_js, an array per training and site over counts 0, 1, …; minus infinity where a count is not allowed. No nodes
        are worth zero, whatever its first element is.
    capacity
        N_s.
    incumbent
        Sites and counts that fit; the result is never worth less.
    time_limit
        Seconds after which the best assignment so far is returned, with a bound.

    Raises
    ------
    PlanningError
        The solver failed.
    """
    groups = _alike(values)
    pieces = [_pieces(values[rows[0]], capacity) for rows in groups]
    best, worth = incumbent, _worth(values, *incumbent)
    scale = max((float(piece.values.max()) for of_group in pieces for piece in of_group), default=0.0)
    if scale <= 0:
        return SiteAssignment(*best, worth, max(worth, 0.0))
    solver = make_solver({**_OPTIONS, "time_limit": time_limit})
    start = _build(solver, groups, pieces, capacity, incumbent, _LARGEST / scale)
    solution = highspy.HighsSolution()
    solution.col_value = start
    solver.setSolution(solution)
    solve(solver)
    info = solver.getInfo()
    # The solver's bound is infinite if there was no time for one. No assignment exceeds the best of each training.
    bound = min(info.mip_dual_bound * scale / _LARGEST, _ceiling(groups, pieces))
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        found = _polish(np.asarray(solver.getSolution().col_value), len(values), groups, pieces, capacity)
        if found is not None and (total := _worth(values, *found)) > worth:
            best, worth = found, total
    return SiteAssignment(*best, worth, max(bound, worth))


def _worth(values: Sequence[Sequence[Table]], sites: Counts, counts: Counts) -> float:
    return sum(
        float(row[site][count]) for row, site, count in zip(values, sites, counts, strict=True) if site != NOWHERE
    )


def _ceiling(groups: Sequence[Sequence[int]], pieces: Sequence[Sequence[_Piece]]) -> float:
    return sum(
        len(members) * max((float(piece.values.max()) for piece in of_group), default=0.0)
        for members, of_group in zip(groups, pieces, strict=True)
    )


def _alike(values: Sequence[Sequence[Table]]) -> list[list[int]]:
    """Group the trainings whose values are equal at every site, in order."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for row, tables in enumerate(values):
        groups.setdefault(tuple(table.tobytes() for table in tables), []).append(row)
    return list(groups.values())


def _pieces(tables: Sequence[Table], capacity: Sequence[int]) -> list[_Piece]:
    """Split the values at each site into concave pieces; those without any positive value are left out."""
    pieces = []
    for site, (table, nodes) in enumerate(zip(tables, capacity, strict=True)):
        allowed = np.flatnonzero(np.isfinite(table[: nodes + 1]))
        allowed = allowed[allowed > 0]
        for run in np.split(allowed, np.flatnonzero(np.diff(allowed) > 1) + 1):
            if len(run) and table[run].max() > 0:
                pieces += [piece for piece in _concave(site, run, table[run]) if piece.values.max() > 0]
    return pieces


def _concave(site: int, run: Counts, values: Table) -> list[_Piece]:
    """Split consecutive counts where the slope increases; keep those at which it changes."""
    slopes = np.diff(values)
    bends = np.diff(slopes)
    noise = _ROUNDING * float(np.abs(values).max())
    edges = [0, *(np.flatnonzero(bends > noise) + 1).tolist(), len(run) - 1]
    pieces = []
    for first, last in pairwise(edges):
        kinks = np.flatnonzero(bends[first : max(first, last - 1)] < -noise) + first + 1
        at = np.unique([first, *kinks.tolist(), last])
        pieces.append(_Piece(site, run[at], values[at]))
    return pieces


def _build(
    solver: highspy.Highs,
    groups: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[_Piece]],
    capacity: Sequence[int],
    incumbent: tuple[Counts, Counts],
    unit: float,
) -> list[float]:
    """Write the programme into the solver; return the incumbent as its start."""
    costs: list[float] = []
    upper: list[float] = []
    integer: list[int] = []
    start: list[float] = []
    rows: list[tuple[list[int], list[float], float]] = []
    used: list[tuple[list[int], list[float]]] = [([], []) for _ in capacity]
    for members, of_group in zip(groups, pieces, strict=True):
        homes = Counter[int]()
        held: dict[int, list[int]] = {}
        for member in members:
            site, count = int(incumbent[0][member]), int(incumbent[1][member])
            for number, piece in enumerate(of_group):
                if piece.site == site and piece.corners[0] <= count <= piece.corners[-1]:
                    homes[number] += 1
                    held.setdefault(number, []).append(count)
                    break
        for number, piece in enumerate(of_group):
            piece.column = len(costs)
            lengths = np.diff(piece.corners)
            slopes = np.diff(piece.values) / lengths
            costs += [float(piece.values[0]) * unit, *(slopes * unit).tolist()]
            upper += [len(members), *(len(members) * lengths).tolist()]
            integer += [1, *[0] * len(lengths)]
            here = np.array(held.get(number, [])).reshape(-1, 1)
            start += [float(homes[number]), *np.clip(here - piece.corners[:-1], 0, lengths).sum(axis=0).tolist()]
            segments = list(range(piece.column + 1, piece.column + 1 + len(lengths)))
            rows += [
                ([one, piece.column], [1.0, -float(size)], 0.0) for one, size in zip(segments, lengths, strict=True)
            ]
            columns, needs = used[piece.site]
            columns += [piece.column, *segments]
            needs += [float(piece.corners[0]), *[1.0] * len(segments)]
        if of_group:
            rows.append(([piece.column for piece in of_group], [1.0] * len(of_group), float(len(members))))
    rows += [(*row, float(nodes)) for row, nodes in zip(used, capacity, strict=True) if row[0]]
    begins = np.cumsum([0, *(len(row[0]) for row in rows)])
    solver.passModel(
        len(costs),
        len(rows),
        int(begins[-1]),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMaximize),
        0.0,
        np.array(costs),
        np.zeros(len(costs)),
        np.array(upper, dtype=float),
        np.full(len(rows), -np.inf),
        np.array([row[2] for row in rows]),
        begins.astype(np.int32),
        np.concatenate([row[0] for row in rows]).astype(np.int32),
        np.concatenate([row[1] for row in rows]),
        np.array(integer, dtype=np.int32),
    )
    return start


def _polish(
    solution: Table,
    trainings: int,
    groups: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[_Piece]],
    capacity: Sequence[int],
) -> tuple[Counts, Counts] | None:
    """Fill the chosen pieces exactly, the steepest segments first; ``None`` if they do not fit after all."""
    sites, counts = np.full(trainings, NOWHERE, dtype=np.int64), np.zeros(trainings, dtype=np.int64)
    left = list(capacity)
    segments: list[tuple[float, int, int]] = []
    for members, of_group in zip(groups, pieces, strict=True):
        chosen = [piece for piece in of_group for _ in range(round(solution[piece.column]))]
        if len(chosen) > len(members):
            return None
        for member, piece in zip(members, chosen, strict=False):
            sites[member], counts[member] = piece.site, piece.corners[0]
            left[piece.site] -= int(piece.corners[0])
            lengths = np.diff(piece.corners)
            slopes = np.diff(piece.values) / lengths
            segments += zip((-slopes).tolist(), repeat(member), lengths.tolist())
    if min(left) < 0:
        return None
    for loss, member, length in sorted(segments):
        site = int(sites[member])
        if loss < 0 and left[site]:
            take = min(left[site], length)
            counts[member] += take
            left[site] -= take
    return sites, counts
