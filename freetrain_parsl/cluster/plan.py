"""The plan of a batch system: when each pending job will start, and on which nodes.

Each pending job, in queue order, gets the earliest start at which enough of the same nodes are free for its whole
requested walltime, given the running jobs and the reservations made before it (conservative backfill; Mu'alem and
Feitelson, IEEE TPDS 12(6), 2001). Time is divided into slots with one set of free nodes each, as in Slurm's backfill.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.nodesets import take

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True)
class PlannedStart:
    """A planned start of a pending job."""

    job_id: str
    start: float
    nodes: int


class Plan:
    """Free nodes over time, from now on.

    Parameters
    ----------
    now
        Start of the first slot, seconds.
    free
        Set of the nodes not held by main jobs now.
    releases
        (time, nodes) of the running main jobs: when they end at the latest. Overdue ones count as ending now.
    soft_releases
        (time, nodes) of the running preemptible jobs, on nodes of `free`. They delay no reservation; nodes that they
        leave in time are preferred, and those on which they would be preempted are taken last.
    """

    def __init__(
        self,
        now: float,
        free: int,
        releases: Iterable[tuple[float, int]],
        soft_releases: Iterable[tuple[float, int]] = (),
    ) -> None:
        self._times = [now]
        self._free = [free]
        for time, nodes in sorted(releases):
            if time > self._times[-1]:
                self._times.append(time)
                self._free.append(self._free[-1])
            self._free[-1] |= nodes
        self._counts = [nodes.bit_count() for nodes in self._free]
        self._soft = sorted(soft_releases, reverse=True)
        self._starts: list[tuple[int, float, float]] = []  # (count, walltime, start) of the jobs planned so far

    def reserve(self, job_id: str, count: int, walltime: float) -> PlannedStart:
        """Plan a job after all previously planned ones; `count` must not exceed the cluster."""
        times, free = self._times, self._free
        first, candidates = self._earliest(count, walltime)
        nodes = self._choose(candidates, count, first)
        start, end = times[first], times[first] + walltime
        last = bisect_left(times, end)
        if last == len(times) or times[last] != end:
            times.insert(last, end)
            free.insert(last, free[last - 1])
            self._counts.insert(last, self._counts[last - 1])
        for slot in range(first, last):
            free[slot] &= ~nodes
            self._counts[slot] -= count
        self._starts.append((count, walltime, start))
        return PlannedStart(job_id, start, nodes)

    def closings(self, nodes: int) -> list[tuple[float | None, int]]:
        """List when the plan first needs each of `nodes`, earliest first; ``None`` for never."""
        closings: list[tuple[float | None, int]] = []
        for time, free in zip(self._times, self._free, strict=True):
            closing = nodes & ~free
            if closing:
                closings.append((time, closing))
                nodes &= free
        if nodes:
            closings.append((None, nodes))
        return closings

    def _earliest(self, count: int, walltime: float) -> tuple[int, int]:
        """Find the first slot from which `count` nodes are free for the walltime, and the set of all such nodes."""
        times, free, counts = self._times, self._free, self._counts
        # Reservations only remove nodes, so no job starts before a smaller and shorter one planned earlier.
        smaller = (start for nodes, time, start in self._starts if nodes <= count and time <= walltime)
        first = bisect_left(times, max(smaller, default=times[0]))
        while True:
            end = times[first] + walltime
            candidates, slot = free[first], first
            while counts[slot] >= count and candidates.bit_count() >= count:
                slot += 1
                if slot == len(times) or times[slot] >= end:
                    return first, candidates
                candidates &= free[slot]
            first = slot + 1 if counts[slot] < count else first + 1

    def _choose(self, candidates: int, count: int, slot: int) -> int:
        """Take `count` of the candidates in order of preference."""
        chosen = 0
        for nodes in self._preferences(candidates, slot):
            chosen |= take(nodes & ~chosen, count - chosen.bit_count())
            if chosen.bit_count() == count:
                break
        return chosen

    def _preferences(self, candidates: int, slot: int) -> Iterator[int]:
        """Yield the candidates that become free last first, so that nodes idle now are not reserved."""
        rest = candidates
        for before in range(slot - 1, -1, -1):
            yield rest & ~self._free[before]
            rest &= self._free[before]
        held = 0
        for end, nodes in self._soft:
            held |= nodes
            if end <= self._times[slot]:
                yield rest & nodes
        yield rest & ~held
        yield rest
