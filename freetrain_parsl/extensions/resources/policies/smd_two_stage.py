"""``smd-two-stage``: each job's fastest combination first, then which jobs to admit, as published."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from freetrain_parsl.extensions.resources.policies.base import KnapsackPolicy

if TYPE_CHECKING:
    from freetrain_parsl.extensions.resources.demands import Combinations, ResourceJob

__all__ = ["SmdTwoStagePolicy"]


class SmdTwoStagePolicy(KnapsackPolicy):
    """SMD's decomposition (Yu et al., INFOCOM 2021), for comparison.

    The inner problem of each job is its fastest combination within its own limit; the outer one, a 0/1 knapsack,
    admits jobs with these. The paper solves the inner problem by linear programmes on a grid of ratios and rounds the
    result. Here it is enumerated, which is at least as good.
    """

    name: ClassVar[str] = "smd-two-stage"

    def consider(self, job: ResourceJob) -> Combinations:
        """Consider only the fastest combination."""
        return job.combinations.fastest()
