"""Workloads of curves: lists of trainers and job logs; jobs take the time that their curve says."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.goodput.baselines import OptimusPolicy, TiresiasPolicy
from freetrain_parsl.extensions.goodput.completion import CompletionTime
from freetrain_parsl.extensions.simulate.description import ClusterShape, JobDescription, Sizing
from freetrain_parsl.extensions.simulate.jobs.curve_jobs import read_job_log, read_trainer_workload
from freetrain_parsl.extensions.simulate.simulation import simulate
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.policies import MilpPolicy

CLUSTER = ClusterShape(2, 4)
HEADER = "name,submit,min,max,work,curve,rescale\n"
SACCT = "JobID|Submit|Start|End|NNodes|Timelimit\n"


@pytest.fixture
def listed(tmp_path):
    def write(*lines):
        file = tmp_path / "jobs.csv"
        file.write_text(HEADER + "\n".join(lines) + "\n")
        return file

    return write


@pytest.mark.parametrize(
    ("policy", "sizing"),
    [(TiresiasPolicy(), Sizing.RIGID), (OptimusPolicy(), Sizing.GPUS), (MilpPolicy(CompletionTime()), Sizing.BOTH)],
)
def test_a_job_alone_takes_its_work_at_its_rate(listed, policy, sizing):
    """36,000 samples at 60 per second on its 8 GPUs, after a start of 20 s; epochs end at whole seconds."""
    file = listed("a,0,2,8,36000,2:20;8:60,up:5;down:6;start:20")
    [request] = read_trainer_workload(file, 8)
    run = simulate([request], CLUSTER, policy, JobDescription(CLUSTER, sizing, work_known=True))
    assert run.jobs[0].jct == pytest.approx(20 + 600, abs=60)  # within a tick: it may be submitted at one
    assert run.jobs[0].restart_seconds == 20 * 8


def test_changes_cost_what_the_trainer_says(listed):
    """Job a grows when b ends: it stands still for 7 s, not for 30."""
    file = listed("a,0,1,8,90000,1:10;8:80,up:7;down:9;start:0", "b,0,4,4,24000,4:40,up:0;down:0;start:0")
    requests = read_trainer_workload(file, 8)
    policy = MilpPolicy(CompletionTime())
    run = simulate(requests, CLUSTER, policy, JobDescription(CLUSTER, Sizing.BOTH, work_known=True))
    jobs = {job.name: job for job in run.jobs}
    assert jobs["a"].phases[-1].gpus == 8
    assert jobs["a"].restarts >= 1
    assert jobs["a"].restart_seconds % 7 == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a,0,1,4,endless,1:10,", "a job needs 'work'"),
        ("a,0,1,9,100,1:10,", "max is 9 GPUs, the cluster has 8"),
        ("a,-5,1,4,100,1:10,", "submit: must be at least 0, got '-5'"),
        ("a,0,1,4,100,1:0;4:10,", "its curve is zero at an allowed number of GPUs"),
        ("a,0,1,4,100,4:10,", "its curve starts at 4 nodes, min is 1"),
        ("a,0,1,4,100,nonet,", "nonet"),
    ],
)
def test_wrong_jobs_are_refused_with_their_line(listed, line, problem):
    file = listed("fine,0,1,4,100,1:10,", line)
    with pytest.raises(InvalidInput, match=problem) as refusal:
        read_trainer_workload(file, 8)
    assert str(refusal.value).startswith(f"{file}:3: ")


TRAINER = PlannedJob("t", 1, 4, ScalingCurve({1: 10, 4: 30}), CostsInSeconds(up=1, down=2, start=3))


def test_jobs_of_a_log_have_the_work_of_their_run_time(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        SACCT
        + "1|2026-01-01T00:10:00|2026-01-01T00:20:00|2026-01-01T00:30:00|4|01:00:00\n"
        + "2|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T00:05:00|1|01:00:00\n"
        + "3|2026-01-01T00:01:00|Unknown|Unknown|1|01:00:00\n"
    )
    first, second = read_job_log(log, [TRAINER], 8)
    assert (first.time, first.gpus, second.time, second.gpus) == (0.0, 1, 600.0, 4)
    rigid = JobDescription(CLUSTER, Sizing.RIGID, work_known=False)
    run = simulate([second], CLUSTER, TiresiasPolicy(), rigid)
    assert run.jobs[0].training_seconds == pytest.approx(4 * 600, abs=4)
    assert run.jobs[0].restart_seconds == 4 * 3


def test_swf_jobs_are_read(tmp_path):
    log = tmp_path / "log.swf"
    log.write_text("; MaxNodes: 8\n; MaxProcs: 8\n1 100 10 600 2 -1 -1 2 900 -1 1 1 1 1 1 1 -1 -1\n")
    [job] = read_job_log(log, [TRAINER], 8)
    assert (job.time, job.gpus) == (0.0, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SACCT + "1|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T01:00:00|9|1:00\n", ":2: the job had 9 nodes"),
        (SACCT + "1|2026-01-01T00:00:00|2026-01-01T01:00:00|2026-01-01T00:00:00|1|1:00\n", ":2: job 1 ends"),
        (SACCT + "1|2026-01-01T00:00:00|Unknown|Unknown|1|1:00\n", "contains no job that ran and ended"),
        ("node,start,end\nn1,0,5\n", "is an idle log"),
        ("nonsense\n", "unknown format"),
    ],
)
def test_wrong_logs_are_refused(tmp_path, text, problem):
    log = tmp_path / "log"
    log.write_text(text)
    with pytest.raises(InvalidInput, match=problem):
        read_job_log(log, [TRAINER], 8)
