"""Tiresias (NSDI 2019): least attained service, in two queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.planning.placement import place_emptiest_first
from freetrain_parsl.planning.policies.base import BaselinePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import Allocation, Pool, Trainer

__all__ = ["TiresiasPolicy"]

_DEMOTED_AT = 16 * 3600.0  # node-seconds, as in Pollux' evaluation


class TiresiasPolicy(BaselinePolicy):
    """Two queues by attained service: trainers that have had 16 node-hours come after those that have not.

    Within a queue, first come, first served. A trainer gets all that it can use, or waits while smaller ones fill the
    gap; one of the second queue is preempted for one of the first. It needs to know neither work nor scaling.
    """

    name = "tiresias"
    needs_hosts = True

    def counts(self, ranked: Sequence[Trainer], pool: Pool, current: Allocation) -> Mapping[str, int]:  # noqa: ARG002 - running trainers have no privilege
        """Decide the counts; see `BaselinePolicy.counts`."""
        counts, left = {}, len(pool)
        for trainer in sorted(ranked, key=lambda t: t.service >= _DEMOTED_AT):  # stable: keeps the order of submission
            count = min(trainer.max_nodes, left)
            if count >= trainer.min_nodes:
                counts[trainer.name] = count
                left -= count
        return counts

    def place(self, counts: Mapping[str, int], pool: Pool, current: Allocation) -> Allocation:
        """Choose the nodes, in the order of the queues; see `BaselinePolicy.place`."""
        return place_emptiest_first(counts, pool, current)
