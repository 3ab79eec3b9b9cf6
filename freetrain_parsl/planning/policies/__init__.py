"""The policies that come with FreeTrain, by name."""

from __future__ import annotations

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.policies.equal_share import EqualSharePolicy
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.planning.policies.window import WindowPolicy

__all__ = ["POLICIES", "EqualSharePolicy", "MilpPolicy", "Policy", "PolicyLike", "WindowPolicy", "resolve_policy"]

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (EqualSharePolicy, MilpPolicy, WindowPolicy)}
"""Name -> class."""

PolicyLike = str | Policy


def resolve_policy(policy: PolicyLike) -> Policy:
    """Return the policy of this name with its defaults; a `Policy` object is returned as it is.

    Raises
    ------
    InvalidSettings
        There is no policy of this name, or it is not a `Policy`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidSettings(f"unknown policy {policy!r}; available: {', '.join(sorted(POLICIES))}")
        return POLICIES[policy]()
    if not isinstance(policy, Policy):
        raise InvalidSettings(f"a policy is a name or a Policy object, got {policy!r}")
    return policy
