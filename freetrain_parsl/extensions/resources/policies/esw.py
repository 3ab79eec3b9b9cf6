"""``esw``: every job has as many servers as workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from freetrain_parsl.extensions.resources.policies.base import KnapsackPolicy

if TYPE_CHECKING:
    from freetrain_parsl.extensions.resources.demands import Combinations, ResourceJob

__all__ = ["EqualServersPolicy"]


class EqualServersPolicy(KnapsackPolicy):
    """Like `SmdTwoStagePolicy`, but with as many servers as workers (SMD's baseline ESW), for comparison."""

    name: ClassVar[str] = "esw"

    def consider(self, job: ResourceJob) -> Combinations:
        """Consider only the fastest combination of equal numbers."""
        combinations = job.combinations
        return combinations.take(combinations.workers == combinations.servers).fastest()
