"""A sharded training job loses a node to the main queue of a real Slurm, and continues in place without it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl import CheckpointSettings
from freetrain_parsl.training.fragment import run_local
from tests.executor.scenario import ScriptedPolicy
from tests.extensions.sharding.test_sharding import make_app
from tests.slurm.main_queue import main_job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slurm


def test_a_preempted_node_gives_its_part_of_the_state_to_the_others(start, cluster, tmp_path: Path) -> None:
    """3 nodes in two blocks: that of the third is preempted; no checkpoint is written before, and none is read."""
    slow = tmp_path / "slow"
    slow.touch()
    others = [main_job(cluster, nodes, 1000, minutes=30) for nodes in (5, 1)]
    for job in others:
        cluster.wait_for_state(job, "RUNNING")
    driver = start(policy=ScriptedPolicy(3), checkpoints=CheckpointSettings(interval=timedelta(hours=1)))
    train = make_app().options(name="t", min_nodes=2)
    future = train(epochs=15, slow=str(slow))
    driver.until_step(1)
    first = set(driver.run.trainings["t"].nodes)
    assert len(first) == 2
    cluster.run("scancel", others[1])
    nodes = driver.until(lambda run: len(run.trainings["t"].nodes) == 3 and set(run.trainings["t"].nodes))
    at = driver.step
    driver.until_step(at + 1)
    (third,) = nodes - first
    cluster.submit("--partition=main", f"--nodelist={third}", "--exclusive", "--time=1", command="sleep 30")
    driver.until_block_ended("preempted")
    driver.until(lambda run: set(run.trainings["t"].nodes) == first)
    slow.unlink()

    result = torch.tensor(future.result(timeout=120))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=15)), atol=1e-4)
    run = driver.until(lambda run: run.completed and run)
    assert [len(fragment.nodes) for fragment in run.fragments] == [2, 3, 2]
    assert [fragment.in_place for fragment in run.fragments] == [False, True, True]
    assert not any(fragment.failure for fragment in run.fragments)
    assert all(fragment.resumed_from is None for fragment in run.fragments)
    progress = run.trainings["t"].progress
    assert (progress["samples"], progress["samples_lost"], progress["duplicate_samples"]) == (15 * 200, 0, 0)
