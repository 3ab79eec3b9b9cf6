"""A shell on a real Slurm with a campaign of one training job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.batch_systems.backends import Slurm
from tests.campaign.shell import APP, Shell

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

EPOCHS, SAMPLES = 12, 200

SITE = """\
system: slurm
block: {partition: preemptible, command_timeout: 5 s}
network: {driver_address: 127.0.0.1}
planner: {startup: 8 s, min_useful: 10 s, closing_margin: 3 s, max_walltime: 10 min, idle_timeout: 3 s, settle: 1 s}
rate_limits: {poll_interval: 1 s, submissions_per_minute: 60}
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


class SlurmShell(Shell):
    """A shell on the cluster whose training job is slow from the start."""

    def __init__(self, cluster, directory: Path, checkpoint_interval: str) -> None:
        super().__init__(directory, site=SITE % checkpoint_interval, campaign=CAMPAIGN)
        self.slurm = Slurm(cluster)
        self.slow.touch()

    def run_until_trained(self, share: float) -> subprocess.Popen[str]:
        """Start the campaign and wait until its training job has done a share."""
        driver = self.start_campaign()
        self.until(f"SELECT 1 FROM training WHERE state = 'running' AND share > {share}", driver)
        return driver
