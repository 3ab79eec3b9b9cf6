"""A campaign on a real Slurm whose driver is killed, or stopped from another shell."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from freetrain_parsl.report.run import RunState
from tests.batch_systems.backends import ROOT, Slurm

pytestmark = pytest.mark.slurm

FREETRAIN = str(Path(sys.executable).with_name("freetrain"))
EPOCHS, SAMPLES = 12, 200

SITE = """\
system: slurm
block: {partition: preemptible, command_timeout: 5 s}
network: {driver_address: 127.0.0.1}
planner: {startup: 8 s, min_useful: 10 s, closing_margin: 3 s, max_walltime: 10 min, idle_timeout: 3 s, settle: 1 s}
manners: {poll_interval: 1 s, submissions_per_minute: 60}
trainings: {threads_per_slot: 1, silence: 30 s}
checkpoints: {interval: %s}
"""

CAMPAIGN = f"""\
name: one
trainings:
  - app: {ROOT}/tests/campaign/slow_app.py:train
    name: t
    max_nodes: 1
    arguments: {{epochs: {EPOCHS}, slow: SLOW}}
"""


class Shell:
    """A directory where ``freetrain`` is run on the cluster; `slow` makes its training slow."""

    def __init__(self, cluster, directory: Path, checkpoint_interval: str) -> None:
        self.slurm = Slurm(cluster)
        self.directory = directory
        self.run_dir = directory / "run"
        self.slow = directory / "slow"
        self.slow.touch()
        (directory / "site.yaml").write_text(SITE % checkpoint_interval)
        (directory / "campaign.yaml").write_text(CAMPAIGN.replace("SLOW", str(self.slow)))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        self.started.append(
            subprocess.Popen(
                [FREETRAIN, *arguments],
                cwd=self.directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self.started[-1]

    def run(self, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_until_trained(self, share: float) -> subprocess.Popen[str]:
        """Start the campaign and let its training come so far."""
        driver = self.start("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")
        end = time.monotonic() + 60
        query = f"SELECT 1 FROM training WHERE state = 'running' AND share > {share}"
        while not ((self.run_dir / "campaign.sqlite").exists() and self._finds(query)):
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < end
            time.sleep(0.2)
        return driver

    def _finds(self, query: str) -> bool:
        with closing(sqlite3.connect(self.run_dir / "campaign.sqlite", timeout=10)) as database:
            return database.execute(query).fetchone() is not None

    def check_result(self) -> None:
        """Hold that every sample was seen once an epoch, and that the last driver did not begin anew."""
        status = json.loads(self.run("status", "run", "--json").stdout)
        assert [item["result"]["samples"] for item in status["trainings"]] == [EPOCHS * SAMPLES]
        run = RunState(Path(status["driver"]["journal"])).refresh()
        progress = run.trainings["t"].progress
        assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)
        assert run.fragments[0].resumed_from > 0


@pytest.fixture
def shell(cluster, tmp_path):
    """Make a shell; whatever it started is killed at the end."""
    shells: list[Shell] = []

    def make(checkpoint_interval: str) -> Shell:
        shells.append(Shell(cluster, tmp_path, checkpoint_interval))
        return shells[-1]

    yield make
    for process in (process for shell in shells for process in shell.started):
        process.kill()
        process.communicate()


def test_after_kill_9_resume_removes_the_orphans_and_finishes_without_loss(shell, cluster) -> None:
    """One block runs, another waits in the queue; nobody is left to withdraw them."""
    shell = shell(checkpoint_interval="1 s")
    driver = shell.run_until_trained(0.2)
    os.kill(driver.pid, 9)
    driver.wait(10)
    running = shell.slurm.running()
    name = cluster.describe(running)["JobName"]
    waiting = cluster.submit("--hold", "--partition=preemptible", f"--job-name={name.replace('block-0', 'block-1')}")
    assert shell.slurm.jobs() == {running: "RUNNING", waiting: "PENDING"}

    shell.slow.unlink()
    resumed = shell.run("resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"{running} ({name})" in resumed.stdout
    assert waiting in resumed.stdout
    assert {cluster.state_of(job) for job in (running, waiting)} == {"CANCELLED"}
    assert shell.slurm.jobs() == {}
    shell.check_result()


def test_stop_from_another_shell_saves_the_work_and_leaves_the_queue_empty(shell) -> None:
    """There is no periodic checkpoint here: what is resumed from was saved at the stop."""
    shell = shell(checkpoint_interval="600 s")
    driver = shell.run_until_trained(0.1)
    stopped = shell.run("stop", "run")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    driver.communicate(timeout=20)
    assert driver.returncode == 1, "not everything is finished"
    assert set(shell.slurm.jobs().values()) <= {"COMPLETING"}
    shell.slow.unlink()
    assert shell.run("resume", "run").returncode == 0
    shell.check_result()
