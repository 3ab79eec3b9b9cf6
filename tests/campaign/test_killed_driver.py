"""A driver with an embedded cluster of its own is killed, and resumed at once."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.cluster import registry
from tests.campaign.cluster_shell import CAMPAIGN, EPOCHS, SAMPLES, SITE
from tests.campaign.shell import Shell

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


def test_its_next_driver_waits_for_the_cluster_that_is_still_ending(tmp_path: Path) -> None:
    """In two of six attempts it was refused: the cluster "is already running"."""
    site = SITE.replace("cluster: %s", "nodes: 2").replace("interval: 600 s", "interval: 1 s")
    shell = Shell(tmp_path, site=site, campaign=CAMPAIGN)
    shell.slow.touch()
    try:
        driver = shell.start_campaign()
        shell.until("SELECT 1 FROM training WHERE state = 'running'", driver)
        directory = str((shell.run_dir / "cluster").resolve())
        (cluster,) = [info for info in registry.running_clusters() if info.directory == directory]
        os.kill(cluster.pid, signal.SIGSTOP)  # it ends as slowly as on a busy machine
        try:
            driver.kill()
            driver.wait(10)
            shell.slow.unlink()
            resumed = shell.start("resume", "run")
            assert resumed.stdout is not None
            lines = []
            for line in resumed.stdout:
                lines.append(line)
                if "waiting for the cluster of a driver that was killed to end" in line:
                    break
            else:
                pytest.fail("".join(lines))
        finally:
            os.kill(cluster.pid, signal.SIGCONT)
        out, err = resumed.communicate(timeout=240)
        assert resumed.returncode == 0, (out, err)
        status = shell.status()
    finally:
        shell.close()
    assert [item["result"]["samples"] for item in status["trainings"]] == [EPOCHS * SAMPLES] * 2
