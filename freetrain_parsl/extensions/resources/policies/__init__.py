"""The policies for several resources, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.extensions.resources.policies.esw import EqualServersPolicy
from freetrain_parsl.extensions.resources.policies.optimus import MarginalGainPolicy
from freetrain_parsl.extensions.resources.policies.smd import SmdPolicy
from freetrain_parsl.extensions.resources.policies.smd_two_stage import SmdTwoStagePolicy

if TYPE_CHECKING:
    from freetrain_parsl.extensions.resources.policies.base import ResourcePolicy

__all__ = ["RESOURCE_POLICIES"]

RESOURCE_POLICIES: dict[str, type[ResourcePolicy]] = {
    policy.name: policy for policy in (SmdPolicy, SmdTwoStagePolicy, EqualServersPolicy, MarginalGainPolicy)
}
"""Name -> class; all can be made without arguments."""
