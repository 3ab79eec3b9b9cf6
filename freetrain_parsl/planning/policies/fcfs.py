"""First come, first served, as in a batch system without backfilling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.planning.placement import place_emptiest_first
from freetrain_parsl.planning.policies.base import BaselinePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import Allocation, Pool, Trainer

__all__ = ["FirstComeFirstServedPolicy"]


class FirstComeFirstServedPolicy(BaselinePolicy):
    """Each trainer gets all that it can use, in order of submission; nobody overtakes one that has to wait."""

    name = "fcfs"

    def counts(self, ranked: Sequence[Trainer], pool: Pool, current: Allocation) -> Mapping[str, int]:  # noqa: ARG002 - the order of submission decides
        """Decide the counts; see `BaselinePolicy.counts`."""
        counts, left = {}, len(pool)
        for trainer in ranked:
            count = min(trainer.max_nodes, left)
            if count < trainer.min_nodes:
                break
            counts[trainer.name] = count
            left -= count
        return counts

    def place(self, counts: Mapping[str, int], pool: Pool, current: Allocation) -> Allocation:
        """Choose the nodes, in order of submission; see `BaselinePolicy.place`."""
        return place_emptiest_first(counts, pool, current)
