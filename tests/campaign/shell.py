"""A directory where ``freetrain`` is run as in a terminal, on the batch system of its site file."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

from freetrain_parsl.report.projection.run import RunState
from tests.processes import MARK, command_line, hear_ctrl_c, marked

APP = Path(__file__).with_name("slow_app.py")
FREETRAIN = str(Path(sys.executable).with_name("freetrain"))


class Shell:
    """Working directory of commands; `run_dir` belongs to its only campaign.

    Parameters
    ----------
    directory
        An empty directory.
    site, campaign
        Contents of ``site.yaml`` and ``campaign.yaml``; ``SLOW`` in the latter is replaced by the path of `slow`, a
        file that makes the training jobs of `APP` slow while it exists.
    """

    def __init__(self, directory: Path, *, site: str, campaign: str) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.slow = directory / "slow"
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []
        (directory / "site.yaml").write_text(site)
        (directory / "campaign.yaml").write_text(campaign.replace("SLOW", str(self.slow)))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        self._started.append(
            subprocess.Popen(
                [FREETRAIN, *arguments],
                cwd=self.directory,
                env={**os.environ, MARK: self._mark},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # its own process group, as in a terminal
                preexec_fn=hear_ctrl_c,  # noqa: PLW1509 - one signal, no lock
            )
        )
        return self._started[-1]

    def start_campaign(self) -> subprocess.Popen[str]:
        """Start the driver of the campaign."""
        return self.start("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", "run")

    def run(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def until(self, condition: str, driver: subprocess.Popen[str], seconds: float = 240) -> None:
        """Wait until a query of the run's database returns rows, or the driver has ended."""
        end = time.monotonic() + seconds
        database = self.run_dir / "campaign.sqlite"
        while not (database.exists() and _finds(database, condition)):
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < end, condition
            time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        """Return the campaign's state."""
        return json.loads(self.run("status", "run", "--json").stdout)

    def left(self) -> list[str]:
        """List the live processes of all that were started here."""
        return [line for process in marked(self._mark) if (line := command_line(process))]

    def check_results(self, samples: list[int], *, resumed: bool) -> None:
        """Assert that each of the first training jobs saw `samples` samples, none twice.

        Parameters
        ----------
        samples
            Number per training job, over all epochs.
        resumed
            Whether the last driver resumed them from where an earlier one had ended.
        """
        status = self.status()
        count = len(samples)
        assert status["finished"] == count
        assert [item["result"]["samples"] for item in status["trainings"][:count]] == samples
        run = RunState(Path(status["driver"]["journal"])).refresh()
        for training in (run.trainings[item["name"]] for item in status["trainings"][:count]):
            assert (training.progress["samples_lost"], training.progress["duplicate_samples"]) == (0, 0)
        assert [(fragment.resumed_from or 0) > 0 for fragment in run.fragments[:count]] == [resumed] * count

    def close(self) -> None:
        """Kill all started processes that are still running."""
        for process in self._started:
            process.kill()
            process.communicate()


def _finds(database: Path, query: str) -> bool:
    with closing(sqlite3.connect(database, timeout=10)) as connection:
        return connection.execute(query).fetchone() is not None
