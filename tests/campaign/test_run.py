"""A campaign from the command line on an embedded cluster: to its end, stopped, killed, and gone on with."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.report.run import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
FREETRAIN = str(Path(sys.executable).with_name("freetrain"))
SAMPLES, EPOCHS = 200, 6

SITE = """\
system: local
block: {cluster: %s}
planner: {startup: 5 s, min_useful: 2 s, closing_margin: 1.5 s, max_walltime: 300 s, idle_timeout: 2 s, settle: 1 s}
manners: {poll_interval: 0.5 s, submissions_per_minute: 100}
trainings: {threads_per_slot: 1, silence: 4 s}
checkpoints: {interval: 600 s}
"""

CAMPAIGN = f"""\
name: two
trainings:
  - app: {HERE / "slow_app.py"}:train
    name: t{{lr}}
    max_nodes: 1
    arguments: {{epochs: {EPOCHS}, slow: slow}}
    grid: {{lr: [0.01, 0.02]}}
"""


def _hear_ctrl_c() -> None:
    """Undo what a shell does to background jobs, of which these tests may be one: they do not hear SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Shell:
    """A directory where commands are run, beside a cluster that outlives them."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.run_dir = directory / "run"
        self.slow = directory / "slow"
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []
        (directory / "site.yaml").write_text(SITE % cluster.name)
        (directory / "campaign.yaml").write_text(CAMPAIGN.replace("slow: slow", f"slow: {self.slow}"))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        self.started.append(
            subprocess.Popen(
                [FREETRAIN, *arguments],
                cwd=self.directory,
                env={**os.environ, "FREETRAIN_TEST_MARK": self.mark},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a process group of its own, as a terminal would give it
                preexec_fn=_hear_ctrl_c,  # noqa: PLW1509 - one signal, no lock
            )
        )
        return self.started[-1]

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def status(self) -> dict[str, Any]:
        return json.loads(self.run("status", str(self.run_dir), "--json").stdout)

    def until(self, condition: str, seconds: float = 60) -> None:
        """Wait until a query of the run's database gives something."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (self.run_dir / "campaign.sqlite").exists():
                with closing(sqlite3.connect(self.run_dir / "campaign.sqlite", timeout=10)) as database:
                    if database.execute(condition).fetchone():
                        return
            time.sleep(0.2)
        raise AssertionError(f"not within {seconds} s: {condition}")

    def jobs(self) -> list[str]:
        return [job["name"] for job in self.cluster.client.queue().values() if job["kind"] == "preemptible"]

    def left(self) -> list[str]:
        """List the processes that carry our mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("FREETRAIN_TEST_MARK") == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:  # noqa: PERF203 - each process may vanish by itself
                continue
        return found

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
        for process in shell.started:
            process.kill()
            process.communicate()


def _audit(shell: _Shell, resumed: bool) -> None:
    """Every training has seen each sample once an epoch, and the last driver began where the one before had ended."""
    status = shell.status()
    assert status["finished"] == 2
    for item in status["trainings"][:2]:
        assert item["result"]["samples"] == EPOCHS * SAMPLES
    run = RunState(Path(status["driver"]["journal"])).refresh()
    for training in (run.trainings[item["name"]] for item in status["trainings"][:2]):
        assert (training.progress["samples_lost"], training.progress["duplicate_samples"]) == (0, 0)
    assert all((fragment.resumed_from or 0) > 0 for fragment in run.fragments[:2]) is resumed


def test_a_campaign_runs_to_its_end_and_keeps_results_and_errors(shell: _Shell) -> None:
    text = (shell.directory / "campaign.yaml").read_text()
    text += f"  - {{app: '{HERE / 'slow_app.py'}:train', name: broken, arguments: {{fail: true}}}}\n"
    (shell.directory / "campaign.yaml").write_text(text)
    done = shell.run("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run", "--json", timeout=90)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {item["name"]: item["state"] for item in told["trainings"]} == {
        "t0.01": "finished",
        "t0.02": "finished",
        "broken": "failed",
    }
    assert told["trainings"][2]["error"] == "ValueError: the user's own mistake"
    _audit(shell, resumed=False)
    assert shell.run_dir.stat().st_mode & 0o077 == 0
    assert shell.nothing_left_within(8), (shell.left(), shell.jobs())

    again = shell.run("resume", "run")
    assert again.returncode == 1, "what failed by itself is tried again only if somebody asks for it"
    assert "1 of 3 trainings are not finished, 1 of them failed" in again.stdout


def test_a_killed_driver_is_told_and_its_campaign_goes_on_where_it_was(shell: _Shell) -> None:
    shell.slow.touch()
    site = (shell.directory / "site.yaml").read_text().replace("interval: 600 s", "interval: 1 s")
    (shell.directory / "site.yaml").write_text(site)
    driver = shell.start("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")
    shell.until(BOTH_RUN)
    busy = shell.run("resume", "run")
    assert busy.returncode == 2
    assert "its driver runs on" in busy.stderr
    assert shell.status()["driver"]["state"] == "alive"
    prefix = shell.jobs()[0].partition("block-")[0]
    driver.kill()
    driver.wait(10)
    # What runs ends by itself when the driver is silent; a block that waits in the queue does not.
    shell.cluster.client.submit(["sleep", "600"], walltime=timedelta(hours=1), name=f"{prefix}block-99")
    assert shell.status()["driver"]["state"] == "dead"
    assert "has died; last sign of life" in shell.run("status", "run").stdout
    shell.slow.unlink()
    resumed = shell.run("resume", "run", timeout=90)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "ending jobs that were left in the queue" in resumed.stdout
    assert f"{prefix}block-99" in resumed.stdout
    _audit(shell, resumed=True)
    assert shell.nothing_left_within(8), (shell.left(), shell.jobs())


def test_stop_from_another_shell_saves_everything_and_resume_goes_on(shell: _Shell) -> None:
    """There is no periodic checkpoint here: what is resumed from was saved at the stop."""
    shell.slow.touch()
    driver = shell.start("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")
    shell.until(BOTH_RUN)
    stopped = shell.run("stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    assert "has ended in order (stopped)" in stopped.stdout
    out, err = driver.communicate(timeout=20)
    assert driver.returncode == 1, err
    assert "2 of 2 trainings are not finished, 0 of them failed" in out
    assert shell.nothing_left_within(8), (shell.left(), shell.jobs())
    assert [item["state"] for item in shell.status()["trainings"]] == ["waiting", "waiting"]
    assert "no job was left" in shell.run("clean", "run").stdout
    shell.slow.unlink()
    assert shell.run("resume", "run", timeout=90).returncode == 0
    _audit(shell, resumed=True)


def test_ctrl_c_ends_in_order_and_leaves_a_run_to_resume(shell: _Shell) -> None:
    """The terminal sends the signal to the driver and to all processes that it has started."""
    shell.slow.touch()
    driver = shell.start("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")
    shell.until(BOTH_RUN)
    os.killpg(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=30)
    assert driver.returncode == 130
    assert "Traceback" not in err
    assert shell.nothing_left_within(8), (shell.left(), shell.jobs())
    status = shell.status()
    assert status["driver"]["how"] == "interrupted"
    assert [item["state"] for item in status["trainings"]] == ["waiting", "waiting"]
    saved = [(shell.run_dir / "checkpoints" / item["name"] / "latest").exists() for item in status["trainings"]]
    assert saved == [True, True]
