"""Rules to compare with: equal shares, and first come, first served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.planning.policies.base import BaselinePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import Allocation, PlannedJob, Pool

__all__ = ["EqualSharePolicy", "FirstComeFirstServedPolicy"]


class EqualSharePolicy(BaselinePolicy):
    """Equal shares, as in the baseline of BFTrainer (arXiv 2106.12091).

    With N nodes and J trainers, each trainer gets ``q = N // J``, up to its ``max_nodes``, or nothing unless q exceeds
    its ``min_nodes`` (as published: a trainer whose ``min_nodes`` equals q gets nothing). The remaining nodes are
    allocated first come, first served, up to ``max_nodes``.
    """

    name = "equal-share"

    def counts(self, ranked: Sequence[PlannedJob], pool: Pool, current: Allocation) -> Mapping[str, int]:  # noqa: ARG002 - the rule ignores what trainers have
        """Decide the counts; see `BaselinePolicy.counts`."""
        nodes = len(pool)
        share = nodes // len(ranked) if ranked else 0
        counts = {t.name: t.at_most(share) if share > t.min_nodes else 0 for t in ranked}
        left = nodes - sum(counts.values())
        for trainer in ranked:
            if count := trainer.at_most(counts[trainer.name] + left):
                left -= count - counts[trainer.name]
                counts[trainer.name] = count
        return counts


class FirstComeFirstServedPolicy(BaselinePolicy):
    """Each trainer gets all that it can use, in order of submission; nobody overtakes one that has to wait."""

    name = "fcfs"

    def counts(self, ranked: Sequence[PlannedJob], pool: Pool, current: Allocation) -> Mapping[str, int]:  # noqa: ARG002 - the order of submission decides
        """Decide the counts; see `BaselinePolicy.counts`."""
        counts, left = {}, len(pool)
        for trainer in ranked:
            if not (count := trainer.at_most(left)):
                break
            counts[trainer.name] = count
            left -= count
        return counts
