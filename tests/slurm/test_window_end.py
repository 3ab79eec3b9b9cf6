"""A window ends, and we leave without preemption. Slurm counts walltimes in minutes, so this takes more than one."""

from __future__ import annotations

import pytest

from tests.slurm.main_queue import main_job, seconds_until_started, until_planned

pytestmark = pytest.mark.slurm


def test_a_training_leaves_before_its_window_ends_and_the_head_job_starts_in_time(start, cluster) -> None:
    """Seven nodes are busy for two minutes, then all eight are planned: the window is one node for one whole minute."""
    busy = main_job(cluster, 7, 1000, minutes=2)
    cluster.wait_for_state(busy, "RUNNING")
    head = main_job(cluster, 8, 1)
    until_planned(cluster, head)
    driver = start("backfill")
    future = driver.train(epochs=60)
    driver.until_step()
    driver.until_block_ended("left its window in time", seconds=100)
    assert [cluster.state_of(job) for job in (busy, head)] == ["RUNNING", "PENDING"], "it was not preempted"
    cluster.run("scancel", busy)
    assert seconds_until_started(cluster, head) < 30, "a scheduler cycle: no node is delayed by us"
    driver.finish(future)
    assert not any(fragment.failure for fragment in driver.run.fragments)
