"""A campaign that is stopped, interrupted or cancelled in part, and resumed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.campaign.cluster_shell import BOTH_RUN, EPOCHS, SAMPLES

if TYPE_CHECKING:
    from tests.campaign.cluster_shell import ClusterShell

pytestmark = pytest.mark.cluster


def test_stop_from_another_shell_saves_everything_and_resume_goes_on(shell: ClusterShell) -> None:
    """There is no periodic checkpoint: the training job resumes from the one saved at the stop."""
    shell.slow.touch()
    driver = shell.start_campaign()
    shell.until(BOTH_RUN, driver)
    stopped = shell.run("stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    assert "has ended cleanly (stopped)" in stopped.stdout
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 1, err
    assert "2 of 2 training jobs are not finished, 0 of them failed" in out
    assert shell.nothing_left_within(60), (shell.left(), shell.jobs())
    assert [item["state"] for item in shell.status()["trainings"]] == ["waiting", "waiting"]
    assert "no remaining jobs" in shell.run("clean", "run").stdout
    shell.slow.unlink()
    assert shell.run("resume", "run").returncode == 0
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=True)


def test_ctrl_c_ends_in_order_and_leaves_a_run_to_resume(shell: ClusterShell) -> None:
    """The terminal sends the signal to the driver and to all processes that it has started."""
    shell.slow.touch()
    driver = shell.start_campaign()
    shell.until(BOTH_RUN, driver)
    os.killpg(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=120)
    assert driver.returncode == 130
    assert "Traceback" not in err
    assert shell.nothing_left_within(60), (shell.left(), shell.jobs())
    status = shell.status()
    assert status["driver"]["how"] == "interrupted"
    assert [item["state"] for item in status["trainings"]] == ["waiting", "waiting"]
    saved = [(shell.run_dir / "checkpoints" / item["name"] / "latest").exists() for item in status["trainings"]]
    assert saved == [True, True]


def test_cancel_from_another_shell_keeps_the_checkpoint_and_resume_needs_the_name(shell: ClusterShell) -> None:
    """There is no periodic checkpoint: the training job resumes from the one saved when it was cancelled."""
    shell.slow.touch()
    driver = shell.start_campaign()
    shell.until(BOTH_RUN, driver)
    cancelled = shell.run("cancel", "run", "t0.01")
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    assert "--retry t0.01" in cancelled.stdout
    assert shell.status()["trainings"][0]["state"] == "cancelled"
    again = shell.run("cancel", "run", "t0.01").stderr
    assert again.startswith("freetrain cancel: t0.01 has ended already: cancelled; to continue it: freetrain resume ")
    assert (shell.run_dir / "checkpoints" / "t0.01" / "latest").exists()
    shell.slow.unlink()
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, out + err
    again = shell.run("resume", "run")
    assert "left out, cancelled: t0.01; --retry NAME retries them" in again.stdout
    assert [item["state"] for item in shell.status()["trainings"]] == ["cancelled", "finished"]
    named = shell.run("resume", "run", "--retry", "t0.01")
    assert named.returncode == 0, named.stdout + named.stderr
    assert [item["result"]["samples"] for item in shell.status()["trainings"]] == [EPOCHS * SAMPLES] * 2
