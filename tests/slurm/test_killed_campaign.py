"""A campaign on a real Slurm whose driver is killed, or stopped from another shell."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.batch_systems.backends import Slurm
from tests.campaign.shell import APP, Shell

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.slurm

EPOCHS, SAMPLES = 12, 200

SITE = """\
system: slurm
block: {partition: preemptible, command_timeout: 5 s}
network: {driver_address: 127.0.0.1}
planner: {startup: 8 s, min_useful: 10 s, closing_margin: 3 s, max_walltime: 10 min, idle_timeout: 3 s, settle: 1 s}
manners: {poll_interval: 1 s, submissions_per_minute: 60}
trainings: {threads_per_slot: 1, heartbeat_timeout: 30 s}
checkpoints: {interval: %s}
"""

CAMPAIGN = f"""\
name: one
trainings:
  - app: {APP}:train
    name: t
    max_nodes: 1
    arguments: {{epochs: {EPOCHS}, slow: SLOW}}
"""


class _Shell(Shell):
    """A shell on the cluster whose training is slow from the start."""

    def __init__(self, cluster, directory: Path, checkpoint_interval: str) -> None:
        super().__init__(directory, site=SITE % checkpoint_interval, campaign=CAMPAIGN)
        self.slurm = Slurm(cluster)
        self.slow.touch()

    def run_until_trained(self, share: float) -> subprocess.Popen[str]:
        """Start the campaign and wait until its training has done a share."""
        driver = self.start_campaign()
        self.until(f"SELECT 1 FROM training WHERE state = 'running' AND share > {share}", driver)
        return driver


@pytest.fixture
def shell(cluster, tmp_path):
    """Make a shell; all its processes are killed at the end."""
    shells: list[_Shell] = []

    def make(checkpoint_interval: str) -> _Shell:
        shells.append(_Shell(cluster, tmp_path, checkpoint_interval))
        return shells[-1]

    yield make
    for shell in shells:
        shell.close()


def test_after_kill_9_resume_removes_the_orphans_and_finishes_without_loss(shell, cluster) -> None:
    """One block runs, another is pending; no process is left to withdraw them."""
    shell = shell(checkpoint_interval="1 s")
    driver = shell.run_until_trained(0.2)
    os.kill(driver.pid, 9)
    driver.wait(10)
    running = shell.slurm.running()
    name = cluster.describe(running)["JobName"]
    another = f"{name.rpartition('-')[0]}-99"
    waiting = cluster.submit("--hold", "--partition=preemptible", f"--job-name={another}")
    assert shell.slurm.jobs() == {running: "RUNNING", waiting: "PENDING"}

    shell.slow.unlink()
    resumed = shell.run("resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"{running} ({name})" in resumed.stdout
    assert waiting in resumed.stdout
    assert {cluster.state_of(job) for job in (running, waiting)} == {"CANCELLED"}
    assert set(shell.slurm.jobs().values()) <= {"COMPLETING"}
    shell.check_results([EPOCHS * SAMPLES], resumed=True)


def test_stop_from_another_shell_saves_the_work_and_leaves_the_queue_empty(shell) -> None:
    """There is no periodic checkpoint: the training resumes from the one saved at the stop."""
    shell = shell(checkpoint_interval="600 s")
    driver = shell.run_until_trained(0.1)
    stopped = shell.run("stop", "run")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    driver.communicate(timeout=20)
    assert driver.returncode == 1, "not everything is finished"
    assert set(shell.slurm.jobs().values()) <= {"COMPLETING"}
    shell.slow.unlink()
    assert shell.run("resume", "run").returncode == 0
    shell.check_results([EPOCHS * SAMPLES], resumed=True)
