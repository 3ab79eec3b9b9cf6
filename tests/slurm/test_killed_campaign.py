"""A campaign on a real Slurm whose driver is killed."""

from __future__ import annotations

import os

import pytest

from tests.slurm.campaign_shell import EPOCHS, SAMPLES

pytestmark = pytest.mark.slurm


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
