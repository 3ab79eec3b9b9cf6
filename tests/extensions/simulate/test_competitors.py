"""Which policies compete with which knowledge, and the figures of a comparison."""

from __future__ import annotations

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.simulate.comparison import COMPETITORS, JobKnowledge, compare_policies, competitors
from freetrain_parsl.extensions.simulate.description import ClusterShape
from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest
from tests.extensions.simulate.small_profiles import small_applications

CLUSTER = ClusterShape(2, 2)


@pytest.fixture
def requests(tmp_path):
    applications = small_applications(tmp_path)
    return [JobRequest(f"j{i}", 50.0 * i, applications["net" if i % 3 else "table"], 1 + i % 2, 256) for i in range(10)]


def test_baselines_have_a_knowledge_of_their_own():
    made = competitors(["tiresias", "milp"], [JobKnowledge.NONE, JobKnowledge.WORK])
    assert [(one.policy, one.knowledge.value) for one in made] == [
        ("tiresias", "age"),
        ("milp", "none"),
        ("milp", "work"),
    ]


def test_unknown_policies_are_refused():
    with pytest.raises(InvalidSettings, match=r"unknown policy 'tirsias' \(did you mean 'tiresias'\?\)"):
        competitors(["tirsias"], [JobKnowledge.WORK])


def test_figures_are_those_of_the_jobs(requests):
    result = compare_policies("w", requests, CLUSTER, competitors(COMPETITORS, list(JobKnowledge)))
    assert {(e["policy"], e["knowledge"]) for e in result["policies"]} >= {("milp", k.value) for k in JobKnowledge}
    for entry in result["policies"]:
        times = [job["jct"] for job in entry["jobs"]]
        assert [job["job"] for job in entry["jobs"]] == [request.name for request in requests]
        assert entry["mean_jct"] == pytest.approx(np.mean(times))
        assert entry["median_jct"] == pytest.approx(np.median(times))
        assert entry["p99_jct"] <= max(times)
        assert entry["refused"] == 0
        assert min(entry["gpu_seconds"].values()) >= 0
        assert sum(entry["gpu_seconds"].values()) == pytest.approx(entry["series"]["seconds"] * CLUSTER.gpus)
        assert entry["life"]["phases"][0]["time"] >= 0


def test_learned_curves_double_the_gpus_at_most(requests):
    """The first GPUs of a job are one, and later ones at most twice the most so far."""
    from freetrain_parsl.extensions.simulate.simulation import simulate

    [learning] = competitors(["milp"], [JobKnowledge.CURVES])
    run = simulate(requests, CLUSTER, learning.make(), learning.description(CLUSTER))
    for job in run.jobs:
        most = 0
        for phase in job.phases:
            assert phase.gpus <= max(1, 2 * most)
            most = max(most, phase.gpus)


def test_progress_reaches_the_end(requests):
    seen = []
    compare_policies(
        "w", requests, CLUSTER, competitors(["fcfs"], []), lambda doing, share: seen.append((doing, share))
    )
    assert seen[-1] == ("fcfs, knowing none", 1.0)
