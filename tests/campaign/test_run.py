"""A campaign from the command line on an embedded cluster: completed, stopped, killed, and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.cluster.client import EmbeddedCluster
from tests.campaign.shell import APP, Shell
from tests.trackers.reading import read_csv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

SAMPLES, EPOCHS = 200, 6

SITE = """\
system: local
block: {cluster: %s}
planner: {startup: 5 s, min_useful: 2 s, closing_margin: 1.5 s, max_walltime: 300 s, idle_timeout: 2 s, settle: 1 s}
manners: {poll_interval: 0.5 s, submissions_per_minute: 100}
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


class _Shell(Shell):
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


BOTH_RUN = "SELECT count(*) FROM training WHERE state = 'running' AND share > 0.05 HAVING count(*) = 2"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[_Shell]:
    with EmbeddedCluster(tmp_path / "cluster", nodes=2) as cluster:
        shell = _Shell(cluster, tmp_path)
        yield shell
        shell.close()


def test_a_campaign_runs_to_its_end_and_keeps_results_and_errors(shell: _Shell) -> None:
    text = (shell.directory / "campaign.yaml").read_text()
    text += f"  - {{app: '{APP}:train', name: broken, arguments: {{fail: true}}}}\n"
    (shell.directory / "campaign.yaml").write_text(text)
    done = shell.run("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {item["name"]: item["state"] for item in told["trainings"]} == {
        "t0.01": "finished",
        "t0.02": "finished",
        "broken": "failed",
    }
    assert told["trainings"][2]["error"] == "ValueError: the user's own mistake"
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=False)
    assert shell.run_dir.stat().st_mode & 0o077 == 0
    blocks = "".join(path.read_text() for path in shell.run_dir.rglob("*.sh.err"))
    assert "without the warm start server" not in blocks, "the tests' nodes would need 7 s of processor time each"
    assert shell.nothing_left_within(60), (shell.left(), shell.jobs())

    again = shell.run("resume", "run")
    assert again.returncode == 1, "a failed training is retried only on request"
    assert "1 of 3 trainings are not finished, 1 of them failed" in again.stdout


def test_a_killed_driver_is_told_and_its_campaign_goes_on_where_it_was(shell: _Shell) -> None:
    shell.slow.touch()
    site = (shell.directory / "site.yaml").read_text().replace("interval: 600 s", "interval: 1 s") + "tracker: csv\n"
    (shell.directory / "site.yaml").write_text(site)
    driver = shell.start_campaign()
    shell.until(BOTH_RUN, driver)
    busy = shell.run("resume", "run")
    assert busy.returncode == 2
    assert "its driver runs on" in busy.stderr
    assert shell.status()["driver"]["state"] == "alive"
    prefix = shell.jobs()[0].partition("block-")[0]
    driver.kill()
    driver.wait(10)
    # Running blocks end by themselves when the driver is gone; pending ones do not.
    shell.cluster.client.submit(["sleep", "600"], walltime=timedelta(hours=1), name=f"{prefix}block-99")
    assert shell.status()["driver"]["state"] == "dead"
    assert "has died; last heartbeat" in shell.run("status", "run").stdout
    shell.slow.unlink()
    resumed = shell.run("resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "cancelling jobs left in the queue" in resumed.stdout
    assert f"{prefix}block-99" in resumed.stdout
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=True)
    printed = shell.run("logs", "run", "t0.01").stdout.splitlines()
    steps = {int(line.split()[1]) for line in printed if line.startswith("step ")}
    missing = set(range(1, EPOCHS * SAMPLES // 20 + 1)) - steps
    assert len(missing) <= 2, "at most those of the second before the driver was killed"
    assert any("resumed from the checkpoint" in line for line in printed if line.startswith("──"))
    values = shell.run_dir / "checkpoints" / "t0.01" / "trackers" / "csv" / "t0.01.csv"
    assert read_csv(values)["made"] == [(step, step) for step in range(1, EPOCHS * SAMPLES // 20 + 1)]
    assert shell.nothing_left_within(60), (shell.left(), shell.jobs())


def test_stop_from_another_shell_saves_everything_and_resume_goes_on(shell: _Shell) -> None:
    """There is no periodic checkpoint: the training resumes from the one saved at the stop."""
    shell.slow.touch()
    driver = shell.start_campaign()
    shell.until(BOTH_RUN, driver)
    stopped = shell.run("stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    assert "has ended cleanly (stopped)" in stopped.stdout
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 1, err
    assert "2 of 2 trainings are not finished, 0 of them failed" in out
    assert shell.nothing_left_within(60), (shell.left(), shell.jobs())
    assert [item["state"] for item in shell.status()["trainings"]] == ["waiting", "waiting"]
    assert "no remaining jobs" in shell.run("clean", "run").stdout
    shell.slow.unlink()
    assert shell.run("resume", "run").returncode == 0
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=True)


def test_ctrl_c_ends_in_order_and_leaves_a_run_to_resume(shell: _Shell) -> None:
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


def test_cancel_from_another_shell_keeps_the_checkpoint_and_resume_needs_the_name(shell: _Shell) -> None:
    """There is no periodic checkpoint: the training resumes from the one saved when it was cancelled."""
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


def test_what_could_not_start_is_tried_again_by_resume(shell: _Shell) -> None:
    good = (shell.directory / "site.yaml").read_text()
    (shell.directory / "good.yaml").write_text(good)
    bad = good.replace("{cluster: ", "{worker_init: 'no-such-module; exit 1', cluster: ")
    (shell.directory / "site.yaml").write_text(bad.replace("manners: {", "manners: {max_failed_blocks: 1, "))
    failed = shell.run("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")
    assert failed.returncode == 1
    assert "2 of 2 trainings are not finished, 0 of them failed" in failed.stdout
    assert "no-such-module: command not found" in shell.status()["trainings"][0]["error"]
    resumed = shell.run("resume", "run", "--config", "good.yaml")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (
        "retrying t0.01, which was interrupted: BatchSystemError: an attempt to start a block failed" in resumed.stdout
    )
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=False)
