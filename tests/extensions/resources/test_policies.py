"""The policies for several resources: their optimum, their rules, and why a job gets nothing."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.extensions.resources.demands import MOST_OF_EACH, ResourceJob, ResourceProblem, SigmoidUtility
from freetrain_parsl.extensions.resources.instances import parse_instance
from freetrain_parsl.extensions.resources.policies import (
    RESOURCE_POLICIES,
    ResourceDecision,
    SmdPolicy,
    reasons_for_nothing,
)
from freetrain_parsl.planning.solvers.multiple_choice import fits, undominated
from tests.support.resource_instances import generate_instance

EVERY_POLICY = pytest.mark.parametrize("name", sorted(RESOURCE_POLICIES))


def generated(jobs, load, seed):
    return parse_instance(generate_instance(jobs, load=load, seed=seed), "generated").problem


def job(name, *, worker=(1.0, 1.0), server=(0.0, 1.0), limit=(10.0, 20.0), seconds=None, utility=None):
    """Make a job of the resources gpu and cpu that takes 100 s divided by its workers, plus 10 s by its servers."""
    return ResourceJob(
        name,
        worker,
        server,
        limit,
        seconds or (lambda workers, servers: 100 / workers + 10 / servers),
        utility or (lambda taken: 200 - taken),
    )


def problem(*jobs, capacity=(10.0, 20.0)):
    return ResourceProblem(("gpu", "cpu"), capacity, jobs)


@EVERY_POLICY
@pytest.mark.parametrize("load", [0.5, 3.0, 6.0])
def test_decisions_fit_and_stay_below_their_bound(name, load):
    for seed in range(3):
        some = generated(8, load, seed)
        decision = RESOURCE_POLICIES[name]().allocate(some)
        assert fits(np.array(some.used(decision.chosen.values())), np.array(some.capacity))
        for one in some.jobs:
            if chosen := decision.chosen.get(one.name):
                assert fits(np.array(chosen.demand), np.array(one.limit))
        assert decision.utility <= decision.bound * (1 + 1e-9)
        assert decision.considered.keys() == {one.name for one in some.jobs}


@EVERY_POLICY
def test_the_same_problem_gets_the_same_decision(name):
    first, second = (RESOURCE_POLICIES[name]().allocate(generated(12, 3.0, 1)) for _ in range(2))
    assert first.chosen == second.chosen


@pytest.mark.parametrize("load", [1.5, 3.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_smd_equals_the_enumeration_of_all_choices(load, seed):
    """Of three jobs; dominated combinations are left out, which is tested on its own."""
    some = generated(3, load, seed)
    tables = [one.combinations for one in some.jobs]
    kept = [table.take(undominated(table.utilities, table.demands)) for table in tables]
    options = [[(0.0, np.zeros(4)), *zip(table.utilities, table.demands, strict=True)] for table in kept]
    best = max(
        sum(worth for worth, _ in choice)
        for choice in itertools.product(*options)
        if fits(np.sum([needs for _, needs in choice], axis=0), np.array(some.capacity))
    )
    decision = SmdPolicy(gap=0.0).allocate(some)
    assert decision.utility == pytest.approx(best)
    assert decision.bound == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_policy_does_better_than_smd(seed):
    some = generated(10, 3.0, seed)
    best = SmdPolicy(gap=0.0).allocate(some)
    for other in RESOURCE_POLICIES.values():
        assert other().allocate(some).utility <= best.bound * (1 + 1e-9)


def test_at_load_three_deciding_together_is_a_quarter_better_than_in_two_stages():
    ratios = []
    for seed in range(6):
        some = generated(10, 3.0, seed)
        joint, staged = (RESOURCE_POLICIES[name]().allocate(some).utility for name in ("smd", "smd-two-stage"))
        ratios.append(joint / staged)
    assert math.prod(ratios) ** (1 / len(ratios)) > 1.25


def test_fifty_jobs_at_load_six_are_decided_to_a_thousandth():
    assert SmdPolicy(gap=1e-3, time_limit=timedelta(minutes=1)).allocate(generated(50, 6.0, 1)).gap <= 1e-3


def test_smd_shares_what_the_two_stages_give_to_one():
    """Two jobs may each have the whole cluster, and the second half of it gains them little."""
    both = problem(job("a"), job("b"))
    shared, staged = (RESOURCE_POLICIES[name]().allocate(both) for name in ("smd", "smd-two-stage"))
    assert {name: chosen.workers for name, chosen in shared.chosen.items()} == {"a": 5, "b": 5}
    [only] = staged.chosen.values()
    assert (only.workers, only.servers) == (10, 10)


def test_equal_servers_are_as_many_as_workers():
    decision = RESOURCE_POLICIES["esw"]().allocate(problem(job("a", limit=(10.0, 13.0))))
    assert (decision.chosen["a"].workers, decision.chosen["a"].servers) == (6, 6)


def test_optimus_begins_with_one_each_and_adds_where_it_saves_most():
    """A gpu is a tenth of the cluster, a cpu a twentieth: workers save more until the third, then a server does."""
    decision = RESOURCE_POLICIES["optimus"]().allocate(problem(job("a"), capacity=(10.0, 7.0)))
    assert (decision.chosen["a"].workers, decision.chosen["a"].servers) == (5, 2)
    # 2 cpus are left after one each: both go to the job that is slower.
    slow = job("slow", seconds=lambda workers, servers: 1000 / workers + 10 / servers)
    decision = RESOURCE_POLICIES["optimus"]().allocate(problem(job("a"), slow, capacity=(10.0, 6.0)))
    assert [(one.workers, one.servers) for one in decision.chosen.values()] == [(1, 1), (3, 1)]


def test_optimus_does_not_add_what_saves_no_time():
    constant = job("constant", seconds=lambda workers, servers: np.full(len(workers), 5.0))
    decision = RESOURCE_POLICIES["optimus"]().allocate(problem(constant))
    assert (decision.chosen["constant"].workers, decision.chosen["constant"].servers) == (1, 1)


def test_a_resource_that_nobody_needs_may_be_missing():
    """Additions that need nothing are free, and a capacity of zero is no reason to divide by it."""
    free = job("free", worker=(0.0, 0.0), server=(0.0, 0.0))
    for policy in RESOURCE_POLICIES.values():
        decision = policy().allocate(problem(free, capacity=(0.0, 0.0)))
        assert decision.chosen["free"].workers == MOST_OF_EACH


def test_combinations_are_within_the_limit_and_forty():
    combinations = job("a", limit=(50.0, 45.0)).combinations
    assert set(zip(combinations.workers.tolist(), combinations.servers.tolist(), strict=True)) == {
        (workers, servers) for workers in range(1, 41) for servers in range(1, 41) if workers + servers <= 45
    }
    assert combinations.seconds[0] == 110.0
    assert combinations[0].demand == (1.0, 2.0)


def test_of_equally_fast_combinations_the_smallest_is_the_fastest():
    constant = job("constant", seconds=lambda workers, servers: np.full(len(workers), 5.0))
    [row] = range(len(fastest := constant.combinations.fastest()))
    assert (fastest[row].workers, fastest[row].servers) == (1, 1)


def test_the_load_is_that_of_the_resource_in_which_it_is_largest():
    assert problem(job("a"), job("b"), capacity=(5.0, 20.0)).load == 4.0
    assert problem(job("a"), capacity=(0.0, 20.0)).load == 1.0, "nobody can use what is not there"
    assert problem(capacity=(5.0, 20.0)).load == 0.0


def test_why_a_job_gets_nothing():
    jobs = problem(
        job("served", utility=lambda _: 1000.0),
        job("tight", limit=(0.5, 20.0)),
        job("late", utility=lambda _: 0.0),
        job("large", worker=(20.0, 1.0), limit=(40.0, 20.0)),
        job("waits"),
        capacity=(1.0, 2.0),
    )
    decision = SmdPolicy().allocate(jobs)
    assert reasons_for_nothing(jobs, decision) == {
        "tight": "one worker and one server exceed its own limit",
        "late": "worth nothing so late: it needs 0.00306 h at least",
        "large": "1 worker and 1 server need 20 gpu, the cluster has 1",
        "waits": "1 worker and 1 server need 1 gpu, the other jobs leave 0",
    }


def test_a_job_that_would_still_fit_was_left_out_within_the_gap():
    jobs = problem(job("a"))
    decision = ResourceDecision({}, {"a": jobs.jobs[0].combinations}, 1.0, 0.0)
    assert reasons_for_nothing(jobs, decision) == {"a": "it would gain less than the permitted gap"}
    assert decision.gap == 1.0


def test_a_sigmoid_halves_at_its_critical_time_and_never_overflows():
    utility = SigmoidUtility(10.0, 0.5, 60.0)
    assert (utility(60.0), utility(1e9)) == (5.0, 0.0)
    assert utility(0.0) == pytest.approx(10.0)
    assert SigmoidUtility(10.0, 0.0, 60.0)(1e9) == 5.0
    with pytest.raises(InvalidApp, match="sigmoid: steepness must be zero or more, got -1"):
        SigmoidUtility(10.0, -1.0, 60.0)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: job(""), "a job needs a name"),
        (lambda: job("a", worker=(1.0,)), "job 'a': worker must have"),
        (lambda: job("a", limit=(-1.0, 1.0)), "job 'a': limit must have zero or more"),
        (lambda: problem(job("a"), job("a")), "two jobs are named 'a'"),
        (lambda: problem(capacity=(1.0,)), "one capacity each"),
        (lambda: problem(capacity=(1.0, math.inf)), "capacities must be zero or more"),
        (lambda: ResourceProblem(("gpu",), (1.0,), (job("a"),)), "needs one limit for each of gpu"),
        (lambda: job("a", seconds=lambda w, s: 0.0 * w).combinations, "one completion time for each .* positive"),
        (lambda: job("a", seconds=lambda w, s: math.inf * w).combinations, "one completion time for each .* positive"),
        (lambda: job("a", seconds=lambda w, s: 5.0).combinations, "needs one completion time for each"),
        (lambda: job("a", utility=lambda _: math.nan).combinations, "must be finite"),
    ],
)
def test_impossible_jobs_and_problems_are_refused(make, problem):
    with pytest.raises(InvalidApp, match=problem):
        make()


def test_settings_of_policies_are_checked():
    with pytest.raises(InvalidSettings, match="policy 'smd': time_limit must be longer than zero"):
        SmdPolicy(time_limit=timedelta(0))
    with pytest.raises(InvalidSettings, match="policy 'smd': gap must lie in"):
        SmdPolicy(gap=1.0)
