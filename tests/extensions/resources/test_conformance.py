"""The policies for several kinds of resources satisfy their contract."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.resources.policies import (
    EqualServersPolicy,
    MarginalGainPolicy,
    ResourceDecision,
    ResourcePolicy,
    SmdPolicy,
    SmdTwoStagePolicy,
)
from freetrain_parsl.extensions.resources.suite import ResourcePolicyConformance


class TestSmd(ResourcePolicyConformance):
    def make_policy(self):
        return SmdPolicy()


class TestSmdTwoStage(ResourcePolicyConformance):
    def make_policy(self):
        return SmdTwoStagePolicy()


class TestEqualServers(ResourcePolicyConformance):
    def make_policy(self):
        return EqualServersPolicy()


class TestMarginalGain(ResourcePolicyConformance):
    def make_policy(self):
        return MarginalGainPolicy()


class _Greedy(ResourcePolicy):
    """Gives every job its fastest combination, whether it fits or not."""

    name = "greedy"

    def allocate(self, problem):
        considered = {job.name: job.combinations for job in problem.jobs}
        chosen = {name: all_of_it.fastest()[0] for name, all_of_it in considered.items()}
        return ResourceDecision(chosen, considered, 0.0, 0.0)


class _GreedySuite(ResourcePolicyConformance):
    def make_policy(self):
        return _Greedy()


@pytest.mark.parametrize("check", [_GreedySuite().test_decision_fits, _GreedySuite().test_bound_is_consistent])
def test_suite_refuses_a_policy_that_exceeds_the_resources(check):
    with pytest.raises(AssertionError):
        check(6.0)
