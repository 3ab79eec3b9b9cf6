"""Campaign episodes: whole ``freetrain run`` campaigns on an embedded cluster, with faults in every kind of process.

The driver is started, killed, stopped and resumed as by a user, and everything else is left to the package. An episode
takes one to four minutes.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from freetrain_parsl.testing.faults import kill, kill_all
from tests.support.chaos.claims import violations_in
from tests.support.chaos.damage import damage_newest
from tests.support.chaos.scene import FILL, EpisodeSettings, Scene
from tests.support.chaos.verification import problems_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.chaos.trainings import Subject

__all__ = ["CAMPAIGN_FAULTS", "CampaignScene"]

CAMPAIGN_FAULTS: Mapping[str, float] = MappingProxyType(
    {
        "kill_slot": 4,
        "kill_all_slots": 1,
        "kill_manager": 2,  # HTEX's process on a node
        "kill_pilot": 1,
        "kill_interchange": 0.5,
        "kill_driver": 1.5,
        "kill_daemon": 0.5,  # the embedded cluster's
        "stop_slot": 3,
        "stop_driver": 1.5,
        "stop_manager": 1,
        "stop_interchange": 1,
        "damage": 2,  # the newest checkpoint of a training job that has others
        "stop_campaign": 1,  # freetrain stop
        "interrupt": 0.7,  # SIGINT, once or twice
    }
)
"""Faults of campaign episodes with relative frequencies; ``fill`` (a full disk) requires a small disk."""

_MARK = "FREETRAIN_CHAOS"
_FREETRAIN = str(Path(sys.executable).with_name("freetrain"))
_EPOCHS, _SAMPLES = 6, 640
_MOST_RESUMES = 12
_ENDS_WITHIN = 60.0  # seconds for the driver to end after SIGTERM
_LEAVES_WITHIN = 30.0  # seconds for all other processes to end after the driver
# Part of a command line -> kind of process; the first match counts.
_ROLES = (
    ("freetrain_parsl.executor.slot.pilot", "pilot"),
    ("htex.worker_pool", "manager"),
    ("interchange", "interchange"),
    ("cluster.daemon", "daemon"),
    ("/freetrain ", "driver"),
)
_SITE: dict[str, Any] = {
    "site": "chaos",
    "system": "local",
    "block": {"nodes": 3, "grace": "4 s"},
    "planner": {
        "startup": "5 s",
        "min_useful": "3 s",
        "closing_margin": "1 s",
        "max_walltime": "10 min",
        "idle_timeout": "5 s",
        "settle": "1 s",
    },
    "rate_limits": {"poll_interval": "1 s", "submissions_per_minute": 120},
    "trainings": {
        "threads_per_slot": 1,
        "heartbeat_timeout": "6 s",
        "peer_timeout": "5 s",
        "rescale_costs": {"up": "1 s", "down": "1 s", "start": "1 s"},
        "max_restarts": 20,
    },
}


class CampaignScene(Scene):
    """Starts the campaign as a user would, and resumes it until it is done.

    Parameters
    ----------
    settings
        Settings of the episode.
    directory
        Directory of the episode.
    checkpoints
        Root of the checkpoints.
    subjects
        The training jobs.
    slots_per_node
        Number of slots of each node; training jobs share nodes that have several.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        directory: Path,
        checkpoints: Path,
        *,
        subjects: Sequence[Subject],
        slots_per_node: int,
    ) -> None:
        super().__init__(settings, checkpoints, first=6.0, pause=2.0)
        self._directory = directory
        self._slots = slots_per_node
        self._subjects = subjects
        self._claims = directory / "claims"
        self._claims.mkdir()
        self._mark = f"{os.getpid()}-{settings.seed}"
        self._run_directory = directory / "run"
        self._outputs = 0
        self._driver: subprocess.Popen[bytes] | None = None
        self._write_files()

    def _write_files(self) -> None:
        site = {**_SITE, "checkpoints": {"interval": "1 s", "least_free": "1 MB", "directory": str(self.checkpoints)}}
        if self._slots > 1:
            site["node"] = {"slots": self._slots}
        (self._directory / "site.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")
        unit = "accelerators" if self._slots > 1 else "nodes"
        trainings = [
            {
                "app": "tests.support.chaos.trainings:train",
                "name": subject.name,
                "seed": subject.seed,
                "arguments": {
                    **subject.arguments(_EPOCHS, _SAMPLES),
                    "out": str(self._result_of(subject.name)),
                    "claims": str(self._claims),
                },
                **subject.options,
                f"min_{unit}": subject.least,
                f"max_{unit}": subject.most,
            }
            for subject in self._subjects
        ]
        campaign = {"name": "chaos", "trainings": trainings}
        (self._directory / "campaign.yaml").write_text(yaml.safe_dump(campaign), encoding="utf-8")

    def live(self) -> None:
        """Run the training jobs to their ends under faults."""
        resumes = 0
        self._start("run", "campaign.yaml", "--config", "site.yaml", "--run-dir", str(self._run_directory))
        assert self._driver is not None
        while True:
            time.sleep(0.1)
            self.resume_due()
            if self.hangs:
                self.problems.append(f"hangs: after {self.settings.limit:g} s the training jobs are {self._states()}")
                return
            if self._driver.poll() is None:
                self.strike_when_due(ready=bool(self._processes()["slot"]))
                continue
            states = self._states()
            if states and set(states.values()) == {"finished"}:
                return
            if "failed" in states.values():
                self.problems += [f"{name}: failed: {error}" for name, error in self._errors()]
                return
            resumes += 1
            if resumes > _MOST_RESUMES or not states:
                self.problems.append(f"after {resumes - 1} resumes the training jobs are {states or 'not there'}")
                return
            time.sleep(self.rng.choice([0, 0.3, 2, 5]))
            self._start("resume", str(self._run_directory))
            self.wait_until_ready()

    def end(self) -> None:
        """End all processes; those that have to be killed are a problem."""
        self.undo()
        if self._driver is not None and self._driver.poll() is None:
            self._driver.terminate()
            try:
                self._driver.wait(_ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                self.problems.append(f"SIGTERM did not end the driver within {_ENDS_WITHIN:g} s")
                self._driver.kill()
                self._driver.wait()
        patience = time.monotonic() + _LEAVES_WITHIN
        while (left := self._processes()) and any(left.values()) and time.monotonic() < patience:
            time.sleep(0.5)
        if living := {role: pids for role, pids in left.items() if pids}:
            self.problems.append(f"left behind {_LEAVES_WITHIN:g} s after the driver's end: {living}")
            kill_all(pid for pids in living.values() for pid in pids)

    def verify(self) -> None:
        """Check the results of the training jobs."""
        self.problems += violations_in(self._claims)
        for subject in self._subjects:
            if self._states().get(subject.name) == "finished":
                self.problems += problems_of(subject, self._result_of(subject.name), _EPOCHS, _SAMPLES)

    def finished(self) -> int:
        """Count the training jobs that ended without an error."""
        return list(self._states().values()).count("finished")

    # The campaign.

    def _result_of(self, name: str) -> Path:
        return self._directory / f"result-{name}.pt"

    def _start(self, *arguments: str) -> None:
        self._outputs += 1
        with (self._directory / f"driver-{self._outputs}.out").open("wb") as out:
            self._driver = subprocess.Popen(
                [_FREETRAIN, *arguments],
                cwd=self._directory,
                env={**os.environ, _MARK: self._mark, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _states(self) -> dict[str, str]:
        return dict(self._query("SELECT name, state FROM training"))

    def _errors(self) -> list[tuple[str, str]]:
        return self._query("SELECT name, error FROM training WHERE error IS NOT NULL")

    def _query(self, statement: str) -> list[tuple[str, str]]:
        try:
            with sqlite3.connect(f"file:{self._run_directory}/campaign.sqlite?mode=ro", uri=True) as database:
                return database.execute(statement).fetchall()
        except sqlite3.Error:
            return []  # does not exist yet, or is being written

    def _processes(self) -> dict[str, list[int]]:
        """Find the live processes of the episode by kind."""
        found: dict[str, list[int]] = defaultdict(list)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[_role_of(process)].append(process.pid)
        return found

    # Faults.

    def strike(self, fault: str) -> str | None:
        """Inject a fault; return what it hit, or None if there was no target."""
        if fault == "damage":
            detail = damage_newest(self.checkpoints, self.rng)
            if detail is not None and self.rng.random() < 0.6:
                kill_all(self._processes()["slot"])
                detail += ", and all slots"
            return detail
        if fault == "stop_campaign":
            return self._stop_campaign()
        if fault == "interrupt":
            return self._interrupt()
        if fault == FILL:
            return self.fill()
        if fault == "kill_all_slots":
            slots = self._processes()["slot"]
            kill_all(slots)
            return f"{len(slots)} slots" if slots else None
        what, _, role = fault.partition("_")
        pids = sorted(pid for pid in self._processes()[role] if not self.is_stopped(pid))
        if not pids:
            return None
        pid = self.rng.choice(pids)
        if what == "kill":
            kill(pid)
            return f"1 of {len(pids)}"
        seconds = self.rng.choice([1, 3, 5, 8, 12])
        self.stop_for(pid, seconds)
        return f"1 of {len(pids)} for {seconds} s"

    def _stop_campaign(self) -> str:
        begin = time.monotonic()
        command = [_FREETRAIN, "stop", str(self._run_directory)]
        done = subprocess.run(command, check=False, capture_output=True, timeout=180)
        seconds = time.monotonic() - begin
        if seconds > _ENDS_WITHIN:
            self.problems.append(f"freetrain stop took {seconds:.0f} s")
        return f"exit code {done.returncode} after {seconds:.1f} s"

    def _interrupt(self) -> str:
        assert self._driver is not None
        os.kill(self._driver.pid, signal.SIGINT)
        if self.rng.random() < 0.4:
            time.sleep(self.rng.uniform(0, 1))
            os.kill(self._driver.pid, signal.SIGINT)
            return "twice"
        return "once"


def _role_of(process: psutil.Process) -> str:
    if process.name() == "freetrain-slot":
        return "slot"
    command = " ".join(process.cmdline())
    return next((role for part, role in _ROLES if part in command), "other")
