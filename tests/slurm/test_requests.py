"""Cost of the polls for Slurm's controller, by its own counters."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl import RateLimits
from freetrain_parsl.windows.slurm.source import SlurmWindowSource

if TYPE_CHECKING:
    from tests.support.slurm.loopback import LoopbackSlurm

pytestmark = pytest.mark.slurm

INTERVAL = RateLimits().poll_interval.total_seconds()
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
    others: Counter[str] = Counter()
    for look in range(looks):
        survey = source.survey([ours])
        assert survey.blocks[ours].nodes
        ahead += INTERVAL
        if look == looks // 2:
            before = _queries(cluster)
            for job in submitted:
                cluster.wait_for_state(job, "COMPLETED")
            others = _queries(cluster) - before
    requests = _queries(cluster) - others
    assert requests["REQUEST_JOB_INFO"] >= looks
    assert sum(requests.values()) <= 12 * MINUTES, requests


def _queries(cluster: LoopbackSlurm) -> Counter[str]:
    """Return how often the controller has answered each kind of query since the last reset."""
    counts = re.findall(r"^\s+(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", cluster.run("sdiag"), re.MULTILINE)
    return Counter(
        {
            name: int(count)
            for name, count in counts
            if name.endswith(("_INFO", "_PING")) and name != "REQUEST_STATS_INFO"
        }
    )
