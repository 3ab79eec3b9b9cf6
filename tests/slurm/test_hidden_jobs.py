"""A site that hides other users' jobs (``PrivateData=jobs``): an ordinary user trains without delaying them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.batch_systems.backends import ROOT
from tests.slurm.main_queue import main_job, seconds_until_started, until_planned
from tests.support.slurm.loopback import LoopbackSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timed,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may submit jobs of two users"),
]

USER = "nobody"
SURVEY = """
import json
from freetrain_parsl.windows.slurm.source import SlurmWindowSource
survey = SlurmWindowSource(partition="{}").survey()
print(json.dumps([[list(window.nodes) for window in survey.windows], survey.unused, survey.notes]))
"""


@pytest.fixture(scope="module")
def hiding(slurm_is_here):
    """Start a cluster that shows each user only their own jobs; the main queue belongs to root."""
    with LoopbackSlurm(nodes=6, bf_interval=1, jobs_read_all=True, extra=["PrivateData=jobs"]) as cluster:
        yield cluster


@pytest.fixture
def cluster(hiding):
    """Provide it to one test, empty."""
    yield hiding
    hiding.clear()


def run_as_user(cluster, *words) -> subprocess.Popen[str]:
    """Start a Python process of the ordinary user, in their own directory."""
    home = cluster.work / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    return subprocess.Popen(
        cluster.as_user(USER, sys.executable, *words),
        env={**cluster.environment, "HOME": str(home), "PYTHONPATH": str(ROOT)},
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def survey(cluster, partition):
    """Query the windows as the ordinary user: nodes of each window, why the others are in none, notes."""
    told, _ = run_as_user(cluster, "-c", SURVEY.format(partition)).communicate(timeout=240)
    return json.loads(told)


def head_job(cluster):
    """Occupy two of the six nodes, and plan a job on five: three idle nodes are planned, one is not."""
    busy = main_job(cluster, 2, 1000, minutes=10)
    cluster.wait_for_state(busy, "RUNNING")
    head = main_job(cluster, 5, 1)
    until_planned(cluster, head)
    return head


def until_marked(cluster, count):
    """Wait until Slurm marks `count` idle nodes as planned."""
    end = time.monotonic() + 120
    while (states := cluster.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()).count(
        "planned"
    ) != count:
        assert time.monotonic() < end, states
        time.sleep(0.1)


@pytest.mark.smoke
def test_nodes_that_are_planned_for_hidden_jobs_are_no_windows(cluster) -> None:
    """Queried as root, the same nodes are a window until the head job starts."""
    head = head_job(cluster)
    until_marked(cluster, 3)
    for partition, left in (("backfill", 0), ("preemptible", 1)):
        windows, unused, notes = survey(cluster, partition)
        assert sum(map(len, windows)) == left, "another job waits, and backfill is not preemptible"
        assert list(unused.values()).count("planned for a job that this site hides") == 3
        assert sum("hides" in note for note in notes) == len(notes) >= 1
    assert cluster.state_of(head) == "PENDING"


def test_blocks_make_way_for_jobs_that_they_cannot_see(cluster) -> None:
    """In a partition without preemption: the scheduler's statistics show that another job waits."""
    busy = main_job(cluster, 4, 1000, minutes=10)
    cluster.wait_for_state(busy, "RUNNING")
    (cluster.work / "run").mkdir()
    (cluster.work / "run").chmod(0o777)
    user = run_as_user(cluster, "-m", "tests.slurm.hidden_user", str(cluster.work / "run"), "backfill")
    try:
        assert user.stdout.readline() == "trains\n"
        waiting = main_job(cluster, 2, 1)
        waited = seconds_until_started(cluster, waiting)
        assert waited < 15, "a poll, the closing margin, and two scheduler cycles; not the block's walltime"
        assert "yielded" in user.stdout.readline()
        user.stdin.write("finish\n")
        user.stdin.flush()
        told, _ = user.communicate(timeout=120)
    finally:
        user.kill()
        user.wait()
        user.stdin.close()
        user.stdout.close()
    assert json.loads(told)["samples"] == 60 * 200
