"""The contract of a policy, as a pytest class to subclass.

::

    from freetrain_parsl.testing.policy_suite import PolicyConformance

    class TestMyPolicy(PolicyConformance):
        def make_policy(self):
            return MyPolicy()
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.placement import check_allocation
from freetrain_parsl.testing.instances import Instance, random_instance, restricted, shared_hosts_instance

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import Decision
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["PolicyConformance"]

_SEEDS = range(25)
_SHARED_SEEDS = range(8)


def _decide(policy: Policy, case: Instance) -> Decision:
    return policy.allocate(case.pool, case.trainers, case.current, case.now)


def _trainer(name: str, least: int, most: int) -> PlannedJob:
    return PlannedJob(name, least, most, ScalingCurve({1: 100.0, 8: 500.0}))


class PolicyConformance(ABC):
    """Properties of every policy, regardless of its objective."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """Make a new policy; two instances must return the same allocations."""

    def test_has_a_name(self) -> None:
        """The name is used in settings and logs."""
        name = self.make_policy().name
        assert isinstance(name, str)
        assert name

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_allocation_is_feasible(self, seed: int) -> None:
        """Only nodes of the pool are allocated, each once; each trainer has none or a number within its bounds."""
        case = random_instance(seed)
        check_allocation(_decide(self.make_policy(), case).allocation, case.pool, case.trainers)

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_nobody_is_moved(self, seed: int) -> None:
        """A growing trainer keeps its nodes, a shrinking one keeps a subset: there is no migration.

        A policy that may exchange nodes in one step sets this test to ``None`` in its class.
        """
        case = random_instance(seed)
        allocation = _decide(self.make_policy(), case).allocation
        for trainer, nodes in case.current.items():
            before = nodes & case.pool.keys()
            after = allocation.get(trainer, frozenset())
            assert after <= before or after >= before, f"{trainer} was moved from {set(before)} to {set(after)}"

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_same_question_same_answer(self, seed: int) -> None:
        """Neither earlier calls nor the order of the arguments change an allocation."""
        case = random_instance(seed)
        used = self.make_policy()
        _decide(used, random_instance(seed + len(_SEEDS)))
        reversed_case = Instance(
            Pool(reversed(list(case.pool.values()))),
            case.trainers[::-1],
            dict(reversed(list(case.current.items()))),
            case.now,
        )
        answer = _decide(self.make_policy(), case).allocation
        assert _decide(used, case).allocation == answer
        assert _decide(used, reversed_case).allocation == answer

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_bound_is_consistent(self, seed: int) -> None:
        """The objective is a number and does not exceed its bound; they are equal if optimality is proven."""
        decision = _decide(self.make_policy(), random_instance(seed))
        slack = 1e-9 * max(1.0, abs(decision.objective))
        assert math.isfinite(decision.objective)
        assert decision.bound >= decision.objective - slack
        assert not decision.proven_optimal or decision.bound <= decision.objective + slack
        assert decision.solve_seconds >= 0

    @pytest.mark.parametrize("seed", _SHARED_SEEDS)
    def test_shared_hosts_are_not_exceeded(self, seed: int) -> None:
        """With nodes that share hosts, curves of elastic batches and known placements, allocations are feasible."""
        case = shared_hosts_instance(seed)
        policy = self.make_policy()
        decision = _decide(policy, case)
        check_allocation(decision.allocation, case.pool, case.trainers, any_layout=policy.any_layout)
        assert decision.bound >= decision.objective - 1e-9 * max(1.0, abs(decision.objective))

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("seed", _SHARED_SEEDS)
    def test_only_allowed_counts_are_given(self, seed: int, *, shared: bool) -> None:
        """A trainer whose model can run on some numbers of nodes only has one of these, or none."""
        case = shared_hosts_instance(seed) if shared else random_instance(seed)
        case = replace(case, trainers=tuple(restricted(case.trainers, seed)))
        policy = self.make_policy()
        decision = _decide(policy, case)
        check_allocation(decision.allocation, case.pool, case.trainers, any_layout=policy.any_layout)
        assert decision.bound >= decision.objective - 1e-9 * max(1.0, abs(decision.objective))

    @pytest.mark.parametrize("seed", _SHARED_SEEDS)
    def test_hosts_do_not_depend_on_the_order_of_arguments(self, seed: int) -> None:
        """With nodes that share hosts, too, the same question has the same answer."""
        case = shared_hosts_instance(seed)
        used = self.make_policy()
        answer = _decide(used, case).allocation
        turned = Pool(reversed(list(case.pool.values())))
        assert used.allocate(turned, case.trainers[::-1], case.current, case.now).allocation == answer

    @pytest.mark.parametrize("seed", _SHARED_SEEDS)
    def test_nobody_changes_hosts_when_all_counts_are_the_same(self, seed: int) -> None:
        """On shared hosts, a decision that is asked for again moves nobody: a change is a restart, or a rescale.

        A policy that weighs such a restart against a better placement sets this test to ``None`` in its class.
        """
        case = shared_hosts_instance(seed)
        policy = self.make_policy()
        first = _decide(policy, case)
        again = policy.allocate(case.pool, case.trainers, first.allocation, case.now)
        if again.counts == first.counts:
            assert again.allocation == first.allocation

    def test_empty_pool_gives_nobody_anything(self) -> None:
        """Without nodes no trainer runs, even if it ran before."""
        trainers = (_trainer("a", 1, 4), _trainer("b", 2, 4))
        current = {"a": frozenset({"gone"})}
        assert not self.make_policy().allocate(Pool(), trainers, current, 0.0).allocation

    def test_no_trainers_get_nothing(self) -> None:
        """Without trainers all nodes stay free."""
        assert not self.make_policy().allocate(Pool([PoolNode("n0")]), (), {}, 0.0).allocation

    def test_lost_nodes_are_not_given(self) -> None:
        """A node that has left the pool is not allocated."""
        pool = Pool([PoolNode("n0"), PoolNode("n1")])
        current = {"a": frozenset({"n0", "gone"})}
        allocation = self.make_policy().allocate(pool, (_trainer("a", 1, 4),), current, 0.0).allocation
        assert "gone" not in allocation.get("a", frozenset())

    def test_who_lost_too_many_nodes_does_not_go_on(self) -> None:
        """A trainer left with fewer nodes than its minimum, without other free nodes, gets none."""
        pool = Pool([PoolNode("n0"), PoolNode("n1")])
        current = {"a": frozenset({"n0", "n1", "gone"})}
        assert not self.make_policy().allocate(pool, (_trainer("a", 3, 4),), current, 0.0).allocation

    def test_trainer_larger_than_the_pool_gets_nothing(self) -> None:
        """A trainer whose minimum exceeds the pool does not get fewer nodes."""
        pool = Pool([PoolNode("n0"), PoolNode("n1")])
        trainers = (_trainer("large", 3, 8), _trainer("small", 1, 2))
        allocation = self.make_policy().allocate(pool, trainers, {}, 0.0).allocation
        assert "large" not in allocation

    def test_arguments_are_left_alone(self) -> None:
        """The call does not modify the trainers or the current allocation."""
        case = random_instance(3)
        trainers, current = list(case.trainers), dict(case.current)
        self.make_policy().allocate(case.pool, trainers, current, case.now)
        assert trainers == list(case.trainers)
        assert current == case.current
