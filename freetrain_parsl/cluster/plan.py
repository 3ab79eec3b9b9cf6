"""The plan of a batch system: when each waiting job is going to start, and on which nodes.

Each waiting job, in order of the queue, gets the earliest start at which enough of the same nodes are free
for its whole requested walltime beside the running jobs and the reservations made before it (conservative
backfill; Mu'alem and Feitelson, IEEE TPDS 12(6), 2001). Time is cut into slots with one set of free nodes
each, as Slurm's backfill does.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.nodesets import take_from

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Reservation:
    """A planned start of a waiting job."""

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
        Set of the nodes that no main job holds now.
    releases
        (time, nodes) of the main jobs that run: when they end at the latest. Overdue ones count as ending
        now.
    soft_releases
        (time, nodes) of the preemptible jobs that run, on nodes of `free`. They delay no reservation; nodes
        that they leave in time are preferred, and those that they would have to be driven from are taken
        last.
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
        self._soft = sorted(soft_releases, reverse=True)

    def reserve(self, job_id: str, count: int, walltime: float) -> Reservation:
        """Plan a job behind all that were planned before; `count` must not exceed the cluster."""
        times, free = self._times, self._free
        first = 0
        while True:
            end = times[first] + walltime
            candidates, slot = free[first], first + 1
            while candidates.bit_count() >= count and slot < len(times) and times[slot] < end:
                candidates &= free[slot]
                slot += 1
            if candidates.bit_count() >= count:
                break
            first += 1
        nodes = self._choose(candidates, count, first)
        last = bisect_left(times, end)
        if last == len(times) or times[last] != end:
            times.insert(last, end)
            free.insert(last, free[last - 1])
        for slot in range(first, last):
            free[slot] &= ~nodes
        return Reservation(job_id, times[first], nodes)

    def closings(self, nodes: int) -> list[tuple[float | None, int]]:
        """List when the plan first needs which of `nodes`, earliest first; ``None`` for never."""
        closings: list[tuple[float | None, int]] = []
        for time, free in zip(self._times, self._free, strict=True):
            closing = nodes & ~free
            if closing:
                closings.append((time, closing))
                nodes &= free
        if nodes:
            closings.append((None, nodes))
        return closings

    def _choose(self, candidates: int, count: int, slot: int) -> int:
        """Take the nodes that become free last, so that those idle now stay out of the reservation."""
        start, latest_first = self._times[slot], []
        rest = candidates
        for before in range(slot - 1, -1, -1):
            latest_first.append(rest & ~self._free[before])
            rest &= self._free[before]
        held = 0
        for end, nodes in self._soft:
            held |= nodes
            if end <= start:
                latest_first.append(rest & nodes)
        return take_from(count, *latest_first, rest & ~held, rest)
