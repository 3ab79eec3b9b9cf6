"""The built-in policies satisfy the contract of policies, and the suite detects policies that do not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from freetrain_parsl.errors import InvalidSettings, PlanningError
from freetrain_parsl.extensions.goodput.baselines import OptimusPolicy, TiresiasPolicy
from freetrain_parsl.extensions.goodput.ones import OnesPolicy
from freetrain_parsl.extensions.goodput.ones_published import OnesPublishedPolicy
from freetrain_parsl.planning.model import Decision
from freetrain_parsl.planning.policies import (
    POLICIES,
    EqualSharePolicy,
    FirstComeFirstServedPolicy,
    MilpPolicy,
    Policy,
    WindowPolicy,
    resolve_policy,
)
from freetrain_parsl.testing.policy_suite import PolicyConformance


class TestMilp(PolicyConformance):
    def make_policy(self):
        return MilpPolicy()


class TestEqualShare(PolicyConformance):
    def make_policy(self):
        return EqualSharePolicy()


class TestFirstComeFirstServed(PolicyConformance):
    def make_policy(self):
        return FirstComeFirstServedPolicy()


class TestTiresias(PolicyConformance):
    def make_policy(self):
        return TiresiasPolicy()


class TestOptimus(PolicyConformance):
    def make_policy(self):
        return OptimusPolicy()


class TestWindow(PolicyConformance):
    test_nobody_is_moved = None  # it may exchange nodes that close soon for others

    def make_policy(self):
        return WindowPolicy(time_limit=timedelta(minutes=1))


class TestOnes(PolicyConformance):
    def make_policy(self):
        return OnesPolicy()


class TestOnesPublished(PolicyConformance):
    test_nobody_changes_hosts_when_all_counts_are_the_same = None  # it reorders trainers

    def make_policy(self):
        return OnesPublishedPolicy()


def test_every_registered_policy_is_covered():
    suites = [one for one in PolicyConformance.__subclasses__() if one.__module__ == __name__]
    tested = {suite().make_policy().name for suite in suites if suite.__name__.startswith("Test")}
    assert tested == set(POLICIES)


class _Broken(Policy):
    """Gives every node to every trainer and claims optimality."""

    name = "broken"

    def allocate(self, pool, trainers, current, now):
        return Decision({t.name: frozenset(pool) for t in trainers}, 2.0, proven_optimal=True, bound=1.0)


class _BrokenSuite(PolicyConformance):
    def make_policy(self):
        return _Broken()


def test_suite_refuses_a_policy_that_gives_a_node_twice():
    with pytest.raises(PlanningError):
        _BrokenSuite().test_allocation_is_feasible(1)


@pytest.mark.parametrize("check", ["test_bound_is_consistent", "test_nobody_is_moved"])
def test_suite_refuses_false_bounds_and_migration(check, monkeypatch):
    class Mover(_Broken):
        def allocate(self, pool, trainers, current, now):
            decision = super().allocate(pool, trainers, current, now)
            held = {t: n & pool.keys() for t, n in current.items()}
            moved = {t: frozenset(pool.keys() - n) for t, n in held.items() if n}
            return Decision(moved, decision.objective, proven_optimal=True, bound=decision.bound)

    suite = _BrokenSuite()
    monkeypatch.setattr(suite, "make_policy", Mover)
    with pytest.raises(AssertionError):
        list(map(getattr(suite, check), range(25)))


def test_policies_are_found_by_name():
    assert {POLICIES[name]().name for name in POLICIES} == POLICIES.keys()
    policy = _Broken()
    assert resolve_policy(policy) is policy


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidSettings,
        match="'best'; available: equal-share, fcfs, milp, ones, ones-published, optimus, tiresias, window",
    ):
        resolve_policy("best")
    with pytest.raises(InvalidSettings, match="got 42"):
        resolve_policy(42)
