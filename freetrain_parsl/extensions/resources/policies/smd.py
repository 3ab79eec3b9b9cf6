"""``smd``: workers and servers of all jobs are decided together."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from freetrain_parsl.extensions.resources.policies.base import KnapsackPolicy

if TYPE_CHECKING:
    from freetrain_parsl.extensions.resources.demands import Combinations, ResourceJob

__all__ = ["SmdPolicy"]


class SmdPolicy(KnapsackPolicy):
    """Chooses among all combinations of all jobs: SMD's problem, solved as a whole.

    A job gets fewer workers or servers than it may have if others make more of the resources.
    """

    name: ClassVar[str] = "smd"

    def consider(self, job: ResourceJob) -> Combinations:
        """Consider every combination."""
        return job.combinations
