"""Cost of the polls for Slurm's controller, by its own counters."""

from __future__ import annotations

import inspect
import re
import time

import pytest

from freetrain_parsl import FreeTrainExecutor
from freetrain_parsl.windows.slurm.source import SlurmWindowSource

pytestmark = pytest.mark.slurm

INTERVAL = inspect.signature(FreeTrainExecutor.__init__).parameters["poll_interval"].default.total_seconds()
MINUTES = 10


def test_ten_minutes_of_looks_at_the_default_interval_are_at_most_twelve_requests_a_minute(cluster) -> None:
    """The clock is simulated, so that it takes seconds; jobs come and go meanwhile."""
    ours = cluster.submit("--partition=preemptible", "--nodes=1", "--time=30")
    cluster.wait_for_state(ours, "RUNNING")
    ahead = 0.0
    source = SlurmWindowSource(partition="preemptible", clock=lambda: time.time() + ahead)
    looks = round(MINUTES * 60 / INTERVAL)
    submitted = [cluster.submit("--partition=main", "--time=1", command="true") for _ in range(3)]
    cluster.run("sdiag", "--reset")
    for look in range(looks):
        survey = source.survey([ours])
        assert survey.blocks[ours].nodes
        ahead += INTERVAL
        if look == looks // 2:
            for job in submitted:
                cluster.wait_for_state(job, "COMPLETED")  # queried per job, which counts as another request
    told = cluster.run("sdiag")
    requests = {
        name: int(count)
        for name, count in re.findall(r"^\s+(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", told, re.MULTILINE)
        if name.endswith(("_INFO", "_PING")) and name != "REQUEST_STATS_INFO"
    }
    assert requests["REQUEST_JOB_INFO"] >= looks
    assert sum(requests.values()) <= 12 * MINUTES, requests
