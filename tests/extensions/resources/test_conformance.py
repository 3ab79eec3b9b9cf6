"""The policies for several kinds of resources satisfy their contract."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import pytest

from freetrain_parsl.extensions.resources.demands import ResourceJob, ResourceProblem, SigmoidUtility
from freetrain_parsl.extensions.resources.policies import (
    EqualServersPolicy,
    MarginalGainPolicy,
    ResourceDecision,
    ResourcePolicy,
    SmdPolicy,
    SmdTwoStagePolicy,
)
from freetrain_parsl.planning.solvers.multiple_choice import fits

_LOADS = (0.5, 3.0, 6.0)
_HOUR = 3600.0


def _problem(load: float, seed: int = 0, jobs: int = 6) -> ResourceProblem:
    """Make a random problem with GPUs, of which servers need none, and CPUs; the load is as in `ResourceProblem`."""
    rng = np.random.default_rng(seed)
    made = [_job(rng, number) for number in range(jobs)]
    wanted = np.sum([job.limit for job in made], axis=0)
    return ResourceProblem(("gpu", "cpu"), tuple((wanted / load).tolist()), tuple(made))


def _job(rng: np.random.Generator, number: int) -> ResourceJob:
    worker, server = (float(rng.integers(1, 5)), float(rng.integers(1, 9))), (0.0, float(rng.integers(1, 5)))
    workers, servers = rng.integers(2, 13, 2).tolist()
    compute, exchange, fixed = rng.uniform((4, 0.1, 0.1), (40, 2, 1)) * _HOUR
    return ResourceJob(
        f"job-{number}",
        worker,
        server,
        tuple(workers * one + servers * other for one, other in zip(worker, server, strict=True)),
        lambda w, s: compute / w + exchange * w / s + fixed,
        SigmoidUtility(float(rng.uniform(1, 100)), float(rng.choice([0.0, 0.5, 5.0])) / _HOUR, 5 * _HOUR),
    )


class ResourcePolicyConformance(ABC):
    """Properties of every policy that divides several kinds of resources."""

    @abstractmethod
    def make_policy(self) -> ResourcePolicy:
        """Make a new policy; two instances must return the same decisions."""

    def test_has_a_name(self) -> None:
        """The name is used in settings and reports."""
        assert self.make_policy().name

    @pytest.mark.parametrize("load", _LOADS)
    def test_decision_fits(self, load: float) -> None:
        """No kind of resource is exceeded, by a job or by all together, and only jobs of the problem get something."""
        problem = _problem(load)
        chosen = self.make_policy().allocate(problem).chosen
        jobs = {job.name: job for job in problem.jobs}
        assert chosen.keys() <= jobs.keys()
        assert fits(np.array(problem.used(chosen.values())), np.array(problem.capacity))
        for name, combination in chosen.items():
            assert fits(np.array(combination.demand), np.array(jobs[name].limit))
            assert min(combination.workers, combination.servers) >= 1

    @pytest.mark.parametrize("load", _LOADS)
    def test_bound_is_consistent(self, load: float) -> None:
        """The utility is a number and does not exceed its bound."""
        decision = self.make_policy().allocate(_problem(load))
        assert math.isfinite(decision.utility)
        assert decision.utility <= decision.bound + 1e-9 * max(1.0, abs(decision.bound))
        assert 0 <= decision.gap <= 1
        assert decision.solve_seconds >= 0

    def test_same_question_same_answer(self) -> None:
        """Earlier calls do not change a decision."""
        used = self.make_policy()
        used.allocate(_problem(3.0, seed=1))
        assert used.allocate(_problem(3.0)).chosen == self.make_policy().allocate(_problem(3.0)).chosen

    def test_no_resources_give_nobody_anything(self) -> None:
        """Without capacity of a kind that all jobs need, none runs."""
        problem = _problem(3.0)
        empty = ResourceProblem(problem.resources, (0.0,) * len(problem.capacity), problem.jobs)
        assert not self.make_policy().allocate(empty).chosen

    def test_no_jobs_get_nothing(self) -> None:
        """Without jobs there is nothing to decide."""
        problem = _problem(3.0)
        assert not self.make_policy().allocate(ResourceProblem(problem.resources, problem.capacity, ())).chosen


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
