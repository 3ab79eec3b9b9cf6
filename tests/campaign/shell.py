"""A directory where ``freetrain`` is run as at a terminal, on whatever batch system its site file names."""

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

from freetrain_parsl.report.run import RunState
from tests.processes import MARK, command_line, hear_ctrl_c, marked

APP = Path(__file__).with_name("slow_app.py")
FREETRAIN = str(Path(sys.executable).with_name("freetrain"))


class Shell:
    """Where commands are run; its `run_dir` is that of the one campaign there.

    Parameters
    ----------
    directory
        Empty.
    site, campaign
        What ``site.yaml`` and ``campaign.yaml`` say; ``SLOW`` in the latter becomes the path of `slow`, a file that
        makes the trainings of `APP` slow while it is there.
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
                start_new_session=True,  # a process group of its own, as a terminal would give it
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
        """Wait until a query of the run's database gives something, or the driver has ended."""
        end = time.monotonic() + seconds
        database = self.run_dir / "campaign.sqlite"
        while not (database.exists() and _finds(database, condition)):
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < end, condition
            time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        """Ask for the campaign's state."""
        return json.loads(self.run("status", "run", "--json").stdout)

    def left(self) -> list[str]:
        """List the processes that live of all that was started here."""
        return [line for process in marked(self._mark) if (line := command_line(process))]

    def check_results(self, samples: list[int], *, resumed: bool) -> None:
        """Hold that each of the first trainings saw so many samples, none twice.

        Parameters
        ----------
        samples
            Of each, all epochs together.
        resumed
            Whether the last driver began with them where one before had ended.
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
        """Kill what was started, if it runs."""
        for process in self._started:
            process.kill()
            process.communicate()


def _finds(database: Path, query: str) -> bool:
    with closing(sqlite3.connect(database, timeout=10)) as connection:
        return connection.execute(query).fetchone() is not None
