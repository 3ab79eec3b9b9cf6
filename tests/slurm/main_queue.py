"""Other users' whole-node jobs in the main queue."""

from __future__ import annotations

import time


def main_job(cluster, nodes, seconds, minutes=1):
    """Submit a job of `seconds`."""
    options = ("--partition=main", f"--nodes={nodes}", "--exclusive", f"--time={minutes}")
    return cluster.submit(*options, command=f"sleep {seconds}")


def until_planned(cluster, job):
    """Wait until Slurm has planned a pending job."""
    end = time.monotonic() + 120
    while "SchedNodeList" not in cluster.describe(job):
        assert time.monotonic() < end, cluster.describe(job)
        time.sleep(0.1)


def seconds_until_started(cluster, job):
    """Wait until it has started."""
    begin = time.monotonic()
    cluster.wait_for_state(job, "RUNNING", "COMPLETED", timeout=120)
    return time.monotonic() - begin
