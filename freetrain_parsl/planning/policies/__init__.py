"""The policies that come with FreeTrain, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.goodput.ones import OnesPolicy
from freetrain_parsl.extensions.goodput.ones_published import OnesPublishedPolicy
from freetrain_parsl.extensions.goodput.optimus import OptimusPolicy
from freetrain_parsl.extensions.goodput.tiresias import TiresiasPolicy
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.policies.equal_share import EqualSharePolicy
from freetrain_parsl.planning.policies.fcfs import FirstComeFirstServedPolicy
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.policies.window import WindowPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.planning.objectives.base import ObjectiveLike

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "EqualSharePolicy",
    "FirstComeFirstServedPolicy",
    "MilpPolicy",
    "OnesPolicy",
    "OnesPublishedPolicy",
    "OptimusPolicy",
    "Policy",
    "PolicyLike",
    "TiresiasPolicy",
    "WindowPolicy",
    "resolve_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        EqualSharePolicy,
        FirstComeFirstServedPolicy,
        MilpPolicy,
        OnesPolicy,
        OnesPublishedPolicy,
        OptimusPolicy,
        TiresiasPolicy,
        WindowPolicy,
    )
}
"""Name -> class."""

PolicyLike = str | Policy

DEFAULT_POLICY = MilpPolicy.name


def resolve_policy(policy: PolicyLike, objective: ObjectiveLike | None = None) -> Policy:
    """Return the policy of this name; a `Policy` object is returned as it is.

    Parameters
    ----------
    policy
        A name, or an object, which has its objective already.
    objective
        What the policy of that name maximises; ``None``: its default.

    Raises
    ------
    InvalidSettings
        There is no policy or objective of this name, or it is not a `Policy`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidSettings(f"unknown policy {policy!r}; available: {', '.join(sorted(POLICIES))}")
        make: Callable[..., Policy] = POLICIES[policy]
        return make() if objective is None else make(objective)
    if not isinstance(policy, Policy):
        raise InvalidSettings(f"a policy is a name or a Policy object, got {policy!r}")
    return policy
