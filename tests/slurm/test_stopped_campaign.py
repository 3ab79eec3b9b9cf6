"""A campaign on a real Slurm that is stopped from another shell."""

from __future__ import annotations

import pytest

from tests.slurm.campaign_shell import EPOCHS, SAMPLES

pytestmark = pytest.mark.slurm


def test_stop_from_another_shell_saves_the_work_and_leaves_the_queue_empty(shell) -> None:
    """There is no periodic checkpoint: the training job resumes from the one saved at the stop."""
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
