"""A shell on an embedded cluster that outlives the drivers of its campaign of two training jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.campaign.shell import APP, Shell

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.cluster.client import EmbeddedCluster

SAMPLES, EPOCHS = 200, 6

SITE = """\
system: local
block: {cluster: %s}
planner: {startup: 5 s, min_useful: 2 s, closing_margin: 1.5 s, max_walltime: 300 s, idle_timeout: 2 s, settle: 1 s}
rate_limits: {poll_interval: 0.5 s, submissions_per_minute: 100}
trainings: {threads_per_slot: 1, heartbeat_timeout: 4 s}
checkpoints: {interval: 600 s}
"""

CAMPAIGN = f"""\
name: two
trainings:
  - app: {APP}:train
    name: t{{lr}}
    max_nodes: 1
    arguments: {{epochs: {EPOCHS}, slow: SLOW}}
    grid: {{lr: [0.01, 0.02]}}
"""

BOTH_RUN = "SELECT count(*) FROM training WHERE state = 'running' AND share > 0.05 HAVING count(*) = 2"


class ClusterShell(Shell):
    """A shell with a cluster that outlives the drivers."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        super().__init__(directory, site=SITE % cluster.name, campaign=CAMPAIGN)
        self.cluster = cluster

    def jobs(self) -> list[str]:
        """Return the names of the blocks in the queue."""
        return [job["name"] for job in self.cluster.client.queue().values() if job["kind"] == "preemptible"]

    def nothing_left_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not (self.left() or self.jobs()):
                return True
            time.sleep(0.2)
        return False
