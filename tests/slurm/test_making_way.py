"""We yield nodes to a main job at once, both without grace and without preemption."""

from __future__ import annotations

import pytest

from tests.slurm.main_queue import main_job, seconds_until_started

pytestmark = pytest.mark.slurm


@pytest.mark.timed
def test_without_any_grace_the_main_job_has_its_nodes_at_once_and_no_work_is_lost(start, cluster) -> None:
    """The slots save and exit at the first signal, long before Slurm kills remaining processes."""
    driver = start("graceless")
    future = driver.train()
    driver.until_step()
    saved = driver.step
    waited = seconds_until_started(cluster, main_job(cluster, 8, 1))
    assert waited < 15, f"waited {waited:.1f} s, and Slurm would kill after KillWait, 20 s"
    driver.until_block_ended("preempted|yielded")  # the latter if our poll of the queue came before its signal
    driver.finish(future)
    assert driver.run.fragments[-1].resumed_from >= saved


@pytest.mark.timed
def test_a_main_job_does_not_wait_for_a_block_that_cannot_be_preempted(start, cluster) -> None:
    """Without preemption, we detect the waiting job and yield by ourselves."""
    driver = start("main")
    future = driver.train()
    driver.until_step()
    waited = seconds_until_started(cluster, main_job(cluster, 8, 1))
    assert waited < 60, f"waited {waited:.1f} s: for a poll, the closing margin and a cycle, not for the block's end"
    driver.until_block_ended("yielded")
    driver.finish(future)
