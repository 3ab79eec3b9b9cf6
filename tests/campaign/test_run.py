"""A campaign from the command line on an embedded cluster: completed, killed, resumed, and started anew."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from tests.campaign.cluster_shell import BOTH_RUN, EPOCHS, SAMPLES
from tests.campaign.shell import APP
from tests.executor.values.reading import read_csv

if TYPE_CHECKING:
    from tests.campaign.cluster_shell import ClusterShell

pytestmark = pytest.mark.cluster


@pytest.mark.smoke
def test_a_campaign_runs_to_its_end_and_keeps_results_and_errors(shell: ClusterShell) -> None:
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
    assert again.returncode == 1, "a failed training job is retried only on request"
    assert "1 of 3 training jobs are not finished, 1 of them failed" in again.stdout


def test_a_killed_driver_is_told_and_its_campaign_goes_on_where_it_was(shell: ClusterShell) -> None:
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


def test_what_could_not_start_is_tried_again_by_resume(shell: ClusterShell) -> None:
    good = (shell.directory / "site.yaml").read_text()
    (shell.directory / "good.yaml").write_text(good)
    bad = good.replace("{cluster: ", "{worker_init: 'no-such-module; exit 1', cluster: ")
    (shell.directory / "site.yaml").write_text(bad.replace("rate_limits: {", "rate_limits: {max_failed_blocks: 1, "))
    failed = shell.run("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")
    assert failed.returncode == 1
    assert "2 of 2 training jobs are not finished, 0 of them failed" in failed.stdout
    assert "no-such-module: command not found" in shell.status()["trainings"][0]["error"]
    resumed = shell.run("resume", "run", "--config", "good.yaml")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (
        "retrying t0.01, which was interrupted: BatchSystemError: an attempt to start a block failed" in resumed.stdout
    )
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=False)
