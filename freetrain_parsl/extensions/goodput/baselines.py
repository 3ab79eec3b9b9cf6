"""Published policies to compare with: Optimus (EuroSys 2018) and Tiresias (NSDI 2019)."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from freetrain_parsl.planning.placement import place
from freetrain_parsl.planning.policies.base import BaselinePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import Allocation, PlannedJob, Pool

__all__ = ["OptimusPolicy", "TiresiasPolicy", "place_emptiest_first"]


def place_emptiest_first(counts: Mapping[str, int], pool: Pool, current: Allocation) -> dict[str, frozenset[str]]:
    """Choose slots on the hosts with the most free ones, in the order of `counts`.

    Tiresias and Optimus place trainers like this in Pollux' evaluation: one whose count changes is placed anew. Without
    shared hosts it is `place`.
    """
    if pool.slots_per_host == 1:
        return place(counts, pool, current)
    placed = {
        name: nodes
        for name, nodes in current.items()
        if nodes and counts.get(name, 0) == len(nodes) and all(node in pool for node in nodes)
    }
    taken = frozenset().union(*placed.values())
    free: dict[str, list[str]] = {}
    for node in pool.values():
        if node.name not in taken:
            free.setdefault(node.machine, []).append(node.name)
    for name, count in counts.items():
        if name in placed or not count:
            continue
        nodes: list[str] = []
        while len(nodes) < count:
            host = max(free, key=lambda host: len(free[host]))
            share = min(count - len(nodes), len(free[host]))
            nodes += free[host][:share]
            del free[host][:share]
        placed[name] = frozenset(nodes)
    return placed


class _EmptiestFirst(BaselinePolicy):
    """A baseline with `place_emptiest_first`."""

    any_layout = True

    def place(self, counts: Mapping[str, int], pool: Pool, current: Allocation) -> Allocation:
        """Choose the slots; see `BaselinePolicy.place`."""
        return place_emptiest_first(counts, pool, current)


class OptimusPolicy(_EmptiestFirst):
    """Greedy marginal gains: each trainer first gets ``min_nodes``, in order of submission; then nodes one by one.

    The next node goes to the trainer whose remaining time, work left divided by rate, it reduces most in seconds, until
    no node reduces any. Without work left (unknown or endless), the time of one sample counts instead.
    """

    name = "optimus"

    def counts(self, ranked: Sequence[PlannedJob], pool: Pool, current: Allocation) -> Mapping[str, int]:  # noqa: ARG002 - greedy from zero each time
        """Decide the counts, smallest first; see `BaselinePolicy.counts`."""
        counts, left = {}, len(pool)
        for trainer in ranked:
            if trainer.min_nodes <= left:
                counts[trainer.name] = trainer.min_nodes
                left -= trainer.min_nodes
        gains = [
            (-_gain(trainer, counts[trainer.name]), number)
            for number, trainer in enumerate(ranked)
            if trainer.name in counts
        ]
        heapq.heapify(gains)
        while left and gains:
            negative, number = heapq.heappop(gains)
            if negative >= 0:
                break
            trainer = ranked[number]
            counts[trainer.name] += 1
            left -= 1
            heapq.heappush(gains, (-_gain(trainer, counts[trainer.name]), number))
        return dict(sorted(counts.items(), key=lambda item: item[1]))


def _gain(trainer: PlannedJob, nodes: int) -> float:
    """Return by how many seconds another node reduces the remaining time."""
    if nodes >= trainer.max_nodes:
        return 0.0
    now, more = trainer.rate(nodes), trainer.rate(nodes + 1)
    if more <= 0:
        return 0.0
    work = trainer.work_left if math.isfinite(trainer.work_left) else 1.0
    return work / now - work / more if now > 0 else math.inf


_DEMOTED_AT = 16 * 3600.0  # node-seconds, as in Pollux' evaluation


class TiresiasPolicy(_EmptiestFirst):
    """Two queues by attained service: trainers that have had 16 node-hours come after those that have not.

    Within a queue, first come, first served. A trainer gets all that it can use, or waits while smaller ones fill the
    gap; one of the second queue is preempted for one of the first. It needs to know neither work nor scaling.
    """

    name = "tiresias"

    def counts(self, ranked: Sequence[PlannedJob], pool: Pool, current: Allocation) -> Mapping[str, int]:  # noqa: ARG002 - running trainers have no privilege
        """Decide the counts; see `BaselinePolicy.counts`."""
        counts, left = {}, len(pool)
        for trainer in sorted(ranked, key=lambda t: t.service >= _DEMOTED_AT):  # stable: keeps the order of submission
            count = min(trainer.max_nodes, left)
            if count >= trainer.min_nodes:
                counts[trainer.name] = count
                left -= count
        return counts
