"""Blocks that wait in the queue of a preemptible partition."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from freetrain_parsl import RateLimits
from tests.batch_systems.backends import Slurm
from tests.slurm.main_queue import main_job

pytestmark = pytest.mark.slurm


def test_a_node_is_used_when_it_becomes_idle_and_not_after_the_next_query(start, cluster) -> None:
    main_jobs = [main_job(cluster, 1, 600, minutes=10) for _ in cluster.node_names]
    for job in main_jobs:
        cluster.wait_for_state(job, "RUNNING", timeout=60)
    interval = 90.0
    begin = time.monotonic()
    driver = start(rate_limits=RateLimits(poll_interval=timedelta(seconds=interval), submissions_per_minute=60))
    future = driver.train(nodes=3)
    ours = Slurm(cluster)
    while sorted(ours.jobs().values()) != ["PENDING", "PENDING"]:
        assert time.monotonic() < begin + 60, ours.jobs()
        time.sleep(0.2)
    cluster.run("scancel", main_jobs[0])
    driver.until_step(1)
    assert time.monotonic() < begin + interval
    states = sorted(ours.jobs().values())
    assert states == ["PENDING", "PENDING", "RUNNING"], "the one that has started is replaced"
    driver.finish(future)
