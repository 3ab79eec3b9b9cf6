"""The driver: ticks, pauses, completion times by hand, and the accounts of GPUs."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.goodput.baselines import TiresiasPolicy
from freetrain_parsl.extensions.goodput.completion import CompletionTime
from freetrain_parsl.extensions.simulate.description import ClusterShape, JobDescription, Sizing
from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest
from freetrain_parsl.extensions.simulate.simulation import simulate
from freetrain_parsl.planning.model import Decision
from freetrain_parsl.planning.policies import POLICIES, MilpPolicy, Policy
from tests.extensions.simulate.small_profiles import small_applications

CLUSTER = ClusterShape(2, 2)
RIGID = JobDescription(CLUSTER, Sizing.RIGID, work_known=False)


@pytest.fixture
def net(tmp_path):
    return small_applications(tmp_path)["net"]


def test_a_job_waits_for_the_tick_then_stands_still_then_trains(net):
    """Submitted at 61 s, it starts at 120 s and trains from 150 s on, at 0.32 s a step; epochs end at whole seconds."""
    run = simulate([JobRequest("a", 61.0, net, 1, 32)], CLUSTER, TiresiasPolicy(), RIGID)
    [job] = run.jobs
    assert job.done_at == 150 + 4 * round(500 * 0.32)
    assert job.jct == job.done_at - 61
    assert run.makespan == job.jct
    assert job.restarts == 0
    assert job.training_seconds == 640
    assert job.restart_seconds == 30


def test_jobs_that_end_in_mid_tick_leave_their_gpus_at_the_next(net):
    requests = [JobRequest(name, 0.0, net, 4, 128) for name in "ab"]
    first, second = simulate(requests, CLUSTER, TiresiasPolicy(), RIGID).jobs
    started = second.phases[0].time if second.phases[0].gpus else second.phases[1].time
    assert started % 60 == 0
    assert 0 <= started - first.done_at < 60


def test_time_without_jobs_is_skipped(net):
    requests = [JobRequest("a", 0.0, net, 1, 32), JobRequest("b", 1e6, net, 1, 32)]
    run = simulate(requests, CLUSTER, TiresiasPolicy(), RIGID)
    assert len(run.use) < 100
    assert run.jobs[1].jct < 1000


@pytest.mark.parametrize("policy", ["fcfs", "tiresias", "optimus", "equal-share", "milp"])
@pytest.mark.parametrize("sizing", Sizing)
def test_every_policy_ends_all_jobs_within_the_cluster(tmp_path, policy, sizing):
    applications = small_applications(tmp_path)
    requests = [
        JobRequest(f"j{i}", 40.0 * i, applications["net" if i % 3 else "table"], 1 + i % 3, 256) for i in range(12)
    ]
    run = simulate(requests, CLUSTER, POLICIES[policy](), JobDescription(CLUSTER, sizing, work_known=True))
    assert run.refused == 0
    assert all(job.is_done for job in run.jobs)
    assert all(use.gpus <= CLUSTER.gpus for use in run.use)
    held = sum(use.gpus for use in run.use) * 60
    assert sum(job.training_seconds + job.restart_seconds for job in run.jobs) <= held


def test_elastic_batches_grow_with_the_gpus(net):
    description = JobDescription(CLUSTER, Sizing.BOTH, work_known=True)
    run = simulate([JobRequest("a", 0.0, net, 1, 32)], CLUSTER, MilpPolicy(CompletionTime()), description)
    assert run.jobs[0].phases[0].gpus == 4
    assert run.jobs[0].phases[0].batch > 32


def test_simulation_is_deterministic(net):
    def once():
        requests = [JobRequest(f"j{i}", 100.0 * i, net, 2, 64) for i in range(6)]
        description = JobDescription(CLUSTER, Sizing.BOTH, work_known=True)
        return [job.jct for job in simulate(requests, CLUSTER, MilpPolicy(CompletionTime()), description).jobs]

    assert once() == once()


class _Idle(Policy):
    name = "idle"

    def allocate(self, pool, trainers, current, now):
        return Decision({}, 0.0, proven_optimal=False, bound=0.0)


def test_a_policy_that_runs_nothing_is_stopped(net):
    with pytest.raises(InvalidSettings, match="policy 'idle': all GPUs are idle while 1 jobs wait"):
        simulate([JobRequest("a", 0.0, net, 1, 32)], CLUSTER, _Idle(), RIGID)


@pytest.mark.parametrize("text", ["16", "0x4", "4x", "4x-1", "axb", "4x4x4"])
def test_wrong_clusters_are_refused(text):
    with pytest.raises(InvalidSettings, match="a cluster is NODESxGPUS"):
        ClusterShape.parse(text)


def test_slots_are_gpus_on_hosts():
    slots = ClusterShape.parse("12x2").slots()
    assert len({slot.name for slot in slots}) == 24
    assert [slot.host for slot in slots][:3] == ["n00", "n00", "n01"]
