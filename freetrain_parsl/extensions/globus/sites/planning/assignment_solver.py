"""Assign each training job to at most one site, and divide the nodes of every site: an exact programme, in HiGHS.

::

    max  sum_j v_js(j)(n_j)    subject to    sum_{j: s(j) = s} n_j <= N_s  for every site s,    v_js any function

A function v_js is split where its slope increases, into pieces on which it is concave. Per training job, site and piece
there is one binary w, worth the value at the piece's first corner, and per segment of the piece its nodes e, at most
its length times w, worth the slope: on a concave piece the steepest segments fill first by themselves. As capacities
and corners are integers, so are the e of a vertex for given w; they need not be integer variables. Training jobs with
equal values are a group, and w is how many of them are on a piece: the solver need not prove the same for each
permutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING

import highspy
import numpy as np

from freetrain_parsl.planning.solvers.counts import ConcavePiece, alike, fill, pieces_of
from freetrain_parsl.planning.solvers.highs import Counts, Programme, Solution, Table, make_solver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NOWHERE", "SiteAssignment", "assign_sites"]

_Piece = tuple[int, ConcavePiece]  # of the values at a site
NOWHERE = -1
"""The site of a training job that gets no nodes."""

_LARGEST = 1000.0  # largest value in the solver's objective: its tolerances are absolute
_OPTIONS: Mapping[str, bool | float] = MappingProxyType(
    {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
)


@dataclass(frozen=True)
class SiteAssignment(Solution):
    """Counts and their quality, and the site of each training job, or `NOWHERE`, shape (J,)."""

    sites: Counts


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
        v_js, an array per training job and site over counts 0, 1, …; minus infinity where a count is not allowed. No
        nodes are worth zero, whatever its first element is.
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
    groups = alike(tuple(table.tobytes() for table in tables) for tables in values)
    pieces = [_pieces(values[rows[0]], capacity) for rows in groups]
    best, worth = incumbent, _worth(values, *incumbent)
    # No assignment exceeds the best of each training job.
    ceilings = [max((-float(piece.losses.min()) for _, piece in of_group), default=0.0) for of_group in pieces]
    ceiling = sum(len(members) * most for members, most in zip(groups, ceilings, strict=True))
    if ceiling <= 0:
        return SiteAssignment(best[1], worth, max(worth, 0.0), best[0])
    unit = max(ceilings) / _LARGEST
    solver = make_solver({**_OPTIONS, "time_limit": time_limit})
    model, start = _build(groups, pieces, capacity, incumbent, 1 / unit)
    model.run(solver, start)
    info = solver.getInfo()
    bound = min(-info.mip_dual_bound * unit, ceiling)  # the solver's is infinite if there was no time for one
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        found = _polish(np.asarray(solver.getSolution().col_value), len(values), groups, pieces, capacity)
        if found is not None and (total := _worth(values, *found)) > worth:
            best, worth = found, total
    return SiteAssignment(best[1], worth, max(bound, worth), best[0])


def _worth(values: Sequence[Sequence[Table]], sites: Counts, counts: Counts) -> float:
    return sum(
        float(row[site][count]) for row, site, count in zip(values, sites, counts, strict=True) if site != NOWHERE
    )


def _pieces(tables: Sequence[Table], capacity: Sequence[int]) -> list[_Piece]:
    """Split the values at each site into concave pieces; those without any positive value are left out."""
    pieces: list[_Piece] = []
    for site, (table, nodes) in enumerate(zip(tables, capacity, strict=True)):
        allowed = np.flatnonzero(np.isfinite(table[: nodes + 1]))
        if len(allowed := allowed[allowed > 0]):
            pieces += [(site, piece) for piece in pieces_of(allowed, -table) if piece.losses.min() < 0]
    return pieces


def _build(
    groups: Sequence[Counts],
    pieces: Sequence[Sequence[_Piece]],
    capacity: Sequence[int],
    incumbent: tuple[Counts, Counts],
    scale: float,
) -> tuple[Programme, Table]:
    """Write the programme, and the incumbent as its start."""
    model = Programme()
    start: list[float] = []
    used: list[list[tuple[int, float]]] = [[] for _ in capacity]
    for members, of_group in zip(groups, pieces, strict=True):
        held: dict[int, list[int]] = {}  # position of a piece -> counts that are on it
        for site, count in zip(incumbent[0][members].tolist(), incumbent[1][members].tolist(), strict=True):
            on = [
                k for k, (at, one) in enumerate(of_group) if at == site and one.corners[0] <= count <= one.corners[-1]
            ]
            if on:
                held.setdefault(on[0], []).append(count)
        for number, (site, piece) in enumerate(of_group):
            begins, uses = piece.add_to(model, len(members), np.array(held.get(number, [])), scale)
            start += begins
            used[site] += uses
        if of_group:
            model.add_row(
                np.array([piece.column for _, piece in of_group]), np.ones(len(of_group)), -np.inf, len(members)
            )
    for uses, nodes in zip(used, capacity, strict=True):
        if uses:
            columns, needs = zip(*uses, strict=True)
            model.add_row(np.array(columns), np.array(needs), -np.inf, nodes)
    return model, np.array(start)


def _polish(
    solution: Table,
    trainings: int,
    groups: Sequence[Counts],
    pieces: Sequence[Sequence[_Piece]],
    capacity: Sequence[int],
) -> tuple[Counts, Counts] | None:
    """Fill the chosen pieces exactly, the steepest segments first; ``None`` if they do not fit after all."""
    sites, counts = np.full(trainings, NOWHERE, dtype=np.int64), np.zeros(trainings, dtype=np.int64)
    left = list(capacity)
    segments: list[tuple[float, int, int]] = []
    for members, of_group in zip(groups, pieces, strict=True):
        chosen = [way for way in of_group for _ in range(round(solution[way[1].column]))]
        if len(chosen) > len(members):
            return None
        for member, (site, piece) in zip(members.tolist(), chosen, strict=False):
            sites[member], counts[member] = site, piece.corners[0]
            left[site] -= int(piece.corners[0])
            lengths = np.diff(piece.corners)
            segments += zip((np.diff(piece.losses) / lengths).tolist(), repeat(member), lengths.tolist())
    if min(left) < 0:
        return None
    fill(counts, segments, sites.tolist(), left)
    return sites, counts
