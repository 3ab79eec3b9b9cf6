"""Replicas of a sharded job on the embedded cluster: a process is killed, and comes back."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl import CheckpointSettings
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.training.fragment import run_local
from tests.extensions.sharding.test_sharding import _pid_of_a_slot, make_app

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.report.projection.run import TrainingState

pytestmark = pytest.mark.cluster


def test_a_replica_continues_and_the_one_that_lost_a_process_is_built_again_from_it(start, tmp_path: Path) -> None:
    """2 x 2; `kill -9` of one process; 1 x 2 without a repeated step; 2 x 2 again; no checkpoint is read."""
    slow, calls = tmp_path / "slow", tmp_path / "calls"
    slow.touch()
    train = make_app().options(name="t", min_nodes=2, max_nodes=4, replicas=2)
    site = start(nodes=4, policy=MilpPolicy(), checkpoints=CheckpointSettings(interval=timedelta(hours=1)))
    future = train(epochs=30, slow=str(slow), calls=str(calls))

    def state() -> TrainingState:
        return site.run.trainings["t"]

    site.until(lambda run: run.trainings and len(state().nodes) == 4 and state().progress.get("step", 0) > 3)
    began = len(site.run.fragments)
    called, killed = len(calls.read_text().split()), state().nodes[1]
    os.kill(_pid_of_a_slot(site, killed), signal.SIGKILL)
    site.until(lambda run: len(run.fragments) > began and len(state().nodes) == 2)
    intact = site.run.fragments[began]
    assert intact.in_place
    assert len(intact.nodes) == 2
    assert killed not in intact.nodes
    site.until(lambda run: len(run.fragments) > began + 1 and len(state().nodes) == 4)
    assert [len(fragment.nodes) for fragment in site.run.fragments[began:]] == [2, 4]
    assert all(fragment.in_place and fragment.resumed_from is None for fragment in site.run.fragments[began:])
    slow.unlink()

    result = torch.tensor(future.result(timeout=180))
    assert torch.allclose(result, torch.tensor(run_local(train.func, epochs=30)), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples"], progress["samples_lost"], progress["duplicate_samples"]) == (30 * 200, 0, 0)
    pids = [int(line) for line in calls.read_text().split()]
    assert len(pids) == len(set(pids)) >= called + 2, "two newcomers; the other processes went on in their call"
