"""The policies, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.policies.baselines import EqualSharePolicy, FirstComeFirstServedPolicy
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
    "Policy",
    "PolicyLike",
    "WindowPolicy",
    "resolve_policy",
]


POLICIES: Final = EntryPoints[type[Policy]]("freetrain.policies", "policy", subclass_of(Policy))
"""Name -> class."""

PolicyLike = str | Policy

DEFAULT_POLICY = MilpPolicy.name


def resolve_policy(policy: PolicyLike, objective: ObjectiveLike | None = None) -> Policy:
    """Return the policy of this name for an executor; a `Policy` object is returned as it is.

    Parameters
    ----------
    policy
        A name, or an object, which has its objective already.
    objective
        What the policy of that name maximises; ``None``: its default.

    Raises
    ------
    InvalidSettings
        There is no policy or objective of this name, it is not a `Policy`, or it has `any_layout`.
    """
    if isinstance(policy, str):
        make: Callable[..., Policy] = POLICIES.find(policy)
        policy = make() if objective is None else make(objective)
    if not isinstance(policy, Policy):
        raise InvalidSettings(f"a policy is a name or a Policy object, got {policy!r}")
    if policy.any_layout:
        raise InvalidSettings(
            f"policy {policy.name!r} spreads jobs over parts of nodes, which is for 'freetrain simulate' and 'replay' "
            f"only; here use {DEFAULT_POLICY!r}"
        )
    return policy
