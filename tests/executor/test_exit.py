"""However a driver ends, none of its jobs or processes remain, and no work is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from freetrain_parsl.cluster.client import EmbeddedCluster
from tests.processes import MARK, alive, command_line, hear_ctrl_c, marked

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster


class _Drivers:
    """Starts drivers that share a cluster, a checkpoint directory and a marker in their environment."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.slow = directory / "slow"
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []
        self.descendants: list[psutil.Process] = []

    def remember(self, driver: subprocess.Popen[str]) -> None:
        """Record the driver's children: one that renames itself, as HTEX's interchange does, loses the marker."""
        self.descendants = psutil.Process(driver.pid).children(recursive=True)

    def start(self, rate_limits: str = "good") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.executor.driver.driver_script"]
        self.started.append(
            subprocess.Popen(
                [*command, self.cluster.name, str(self.directory), str(self.slow), rate_limits],
                env={**os.environ, MARK: self.mark},
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=hear_ctrl_c,  # noqa: PLW1509 - one signal, no lock
            )
        )
        return self.started[-1]

    def left(self) -> list[str]:
        """Return the processes with the marker, and the executor's jobs in the queue."""
        jobs = [f"job {job}" for job, j in self.cluster.client.queue().items() if j["kind"] == "preemptible"]
        living = [*marked(self.mark), *(process for process in self.descendants if alive(process))]
        return jobs + [line for process in living if (line := command_line(process))]

    def nothing_left_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.left():
                return True
            time.sleep(0.2)
        return False


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[_Drivers]:
    with EmbeddedCluster(tmp_path / "cluster", nodes=2) as cluster:
        drivers = _Drivers(cluster, tmp_path)
        yield drivers
        for process in drivers.started:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.smoke
def test_after_a_normal_exit_nothing_is_left(drivers: _Drivers) -> None:
    driver = drivers.start()
    driver.wait(60)
    assert driver.returncode == 0
    assert drivers.nothing_left_within(6), drivers.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_ctrl_c_or_a_polite_kill_nothing_is_left(drivers: _Drivers, number: signal.Signals) -> None:
    drivers.slow.touch()
    driver = drivers.start()
    assert _line(driver) == "checkpoint"
    drivers.remember(driver)
    left = drivers.left()
    for what in ("job ", "HTEX interchange", "htex.worker_pool"):
        assert any(what in line for line in left), "the check itself works"
    driver.send_signal(number)
    assert driver.wait(30) != 0, "it did not run to its end"
    assert drivers.nothing_left_within(6), drivers.left()


def test_a_script_that_cleans_nothing_up_leaves_no_job(drivers: _Drivers) -> None:
    """No ``with parsl.load(…)``, no ``cleanup()``: the interpreter just ends."""
    drivers.slow.touch()
    driver = drivers.start(rate_limits="none")
    assert _line(driver) == "checkpoint"
    driver.wait(30)
    assert drivers.nothing_left_within(20), drivers.left()


def test_a_killed_driver_leaves_checkpoints_that_a_second_run_resumes_from(drivers: _Drivers) -> None:
    drivers.slow.touch()
    driver = drivers.start()
    assert _line(driver) == "checkpoint"
    drivers.remember(driver)
    driver.kill()
    driver.wait(10)
    # A node that is still starting looks for the driver for 30 s, as does HTEX's worker pool for its interchange.
    assert drivers.nothing_left_within(60), drivers.left()

    drivers.slow.unlink()
    second = drivers.start()
    assert _line(second) == "checkpoint"
    result = json.loads(_line(second))
    assert result["resumed"][0] > 0
    assert result["metrics"]["samples"] == 10 * 200
    assert (result["progress"]["samples_lost"], result["progress"]["duplicate_samples"]) == (0, 0)
    second.wait(30)
    assert drivers.nothing_left_within(6), drivers.left()
