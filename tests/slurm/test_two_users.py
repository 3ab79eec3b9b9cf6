"""Two users of FreeTrain on one cluster do not compete for the same window for ever."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.batch_systems.backends import ROOT
from tests.batch_systems.driving import SAMPLES_PER_EPOCH

pytestmark = pytest.mark.slurm

HOLE = 3  # nodes


@pytest.fixture
def other_user(cluster, tmp_path):
    """Start another user's FreeTrain; it waits for a line to begin."""
    (tmp_path / "other").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.other_user", str(tmp_path / "other"), str(HOLE)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_two_users_after_the_same_nodes_both_finish_with_few_blocks(start, cluster, other_user) -> None:
    """Both want all nodes of a three-node window at the same time; they train in sequence, or concurrently."""
    others = len(cluster.node_names) - HOLE
    busy = cluster.submit("--partition=main", f"--nodes={others}", "--exclusive", "--time=10")
    cluster.wait_for_state(busy, "RUNNING")
    driver = start()
    assert other_user.stdout.readline() == "loaded\n"
    first = int(cluster.submit("--hold", "--time=1"))

    other_user.stdin.write("begin\n")
    other_user.stdin.flush()
    future = driver.train(nodes=HOLE)
    driver.until_step(40)  # some seconds, in which the other may request the nodes
    driver.finish(future)
    told, _ = other_user.communicate(timeout=240)
    assert json.loads(told)["samples"] == driver.epochs * SAMPLES_PER_EPOCH
    assert other_user.returncode == 0

    blocks = int(cluster.submit("--hold", "--time=1")) - first - 1  # Slurm numbers its jobs
    assert 2 <= blocks <= 12
    assert all("yielded" not in reason for reason in driver.run.blocks_ended), "no main job waited"
    assert cluster.state_of(busy) == "RUNNING"
