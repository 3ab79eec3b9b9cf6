"""A training job continues when a node fails: with all its processes, or only for the batch system."""

from __future__ import annotations

import psutil
import pytest

pytestmark = pytest.mark.slurm


def kill_daemon(node):
    """Kill a node's slurmd, a child of this process, and nothing else on it."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    (daemon,) = [child for child in living if child.cmdline()[2:4] == ["-N", node]]
    daemon.kill()


def test_a_training_survives_the_loss_of_a_node_and_the_node_is_used_again(start, cluster) -> None:
    driver = start()
    future = driver.train(nodes=2)
    driver.until(lambda run: "t" in run.trainings and len(run.trainings["t"].nodes) == 2)
    driver.until_step()
    lost = driver.run.trainings["t"].nodes[0]
    cluster.kill_node(lost)
    driver.until(lambda run: any(f.failure for f in run.fragments) and lost not in run.fragments[-1].nodes)
    cluster.start_node(lost)
    driver.finish(future)


def test_a_block_whose_slurmd_is_killed_trains_on_until_slurm_gives_the_node_up(start, cluster) -> None:
    """Slurm notices after SlurmdTimeout and ends the job; the training job continues elsewhere without losing steps."""
    driver = start()
    future = driver.train(epochs=60)  # longer than Slurm may take to notice
    driver.until_step()
    (node,) = driver.run.trainings["t"].nodes
    kill_daemon(node)
    step = driver.step
    driver.until_block_ended("had a node failure")
    assert driver.step > step + 20, "the slot itself was not affected"
    resumed = driver.until(lambda run: run.fragments[-1].resumed_from is not None and run.fragments[-1])
    assert resumed.nodes != (node,)
    assert resumed.resumed_from > step
    cluster.start_node(node)
    driver.finish(future)
