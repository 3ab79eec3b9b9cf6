"""State of the fake commands between calls, and their connection to the cluster."""

from __future__ import annotations

import getpass
import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from freetrain_parsl.cluster.client import ClusterClient
from freetrain_parsl.errors import InvalidSettings
from tests.support import bed_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["QUEUES", "FakeJob", "Store", "StoreSettings", "Submission", "calls"]

QUEUES = ("main", "backfill", "preemptible")
"""Queues of both fakes; the first is the default, and its jobs are main jobs of the cluster."""

_SETTINGS, _CALLS, _JOBS, _SPOOL = "fake.json", "calls", "jobs", "spool"


@dataclass(frozen=True)
class StoreSettings:
    """Settings of a directory of fakes: ``slurm`` or ``pbs``, the cluster behind it, and the version."""

    kind: str
    cluster: str
    version: str
    cpus: int


@dataclass(frozen=True)
class Submission:
    """Request of a batch script; walltime in seconds."""

    name: str
    queue: str
    nodes: int
    walltime: float
    nodelist: tuple[str, ...] | None
    stdout: Path | None
    stderr: Path | None
    env: Mapping[str, str]


@dataclass(frozen=True)
class FakeJob:
    """A job of the cluster as the fakes show it; times are seconds since the epoch.

    `state` is the cluster's (`cluster.batch.JobState`); `planned` are the nodes of the planned start.
    """

    id: str
    name: str
    user: str
    queue: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    node_count: int
    walltime: float
    submit: float
    start: float | None
    end: float | None
    ends: float | None
    ending: bool
    exit_code: int
    planned_start: float | None
    planned: tuple[str, ...]


class Store:
    """A directory of fakes.

    Parameters
    ----------
    directory
        Made by `create`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = StoreSettings(**json.loads((directory / _SETTINGS).read_text(encoding="utf-8")))
        self._client: ClusterClient | None = None

    @classmethod
    def create(cls, directory: Path, settings: StoreSettings) -> Store:
        """Make the directory."""
        for name in (_JOBS, _SPOOL):
            (directory / name).mkdir(parents=True)
        (directory / _SETTINGS).write_text(json.dumps(asdict(settings)), encoding="utf-8")
        return cls(directory)

    @property
    def client(self) -> ClusterClient:
        """Connect to the cluster."""
        if self._client is None:
            self._client = ClusterClient(self.settings.cluster)
        return self._client

    def note_call(self, arguments: Sequence[str]) -> None:
        """Record a call of a command."""
        with (self.directory / _CALLS).open("a", encoding="utf-8") as file:
            file.write(json.dumps([time.time(), *arguments]) + "\n")

    def submit(self, script: str, submission: Submission) -> str:
        """Queue a batch script and return its job id.

        Raises
        ------
        InvalidSettings
            The queue does not exist, or the cluster can never run the job.
        """
        if submission.queue not in QUEUES:
            raise InvalidSettings(f"there is no queue {submission.queue!r}")
        spooled = self.directory / _SPOOL / os.urandom(8).hex()
        with os.fdopen(os.open(spooled, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w") as file:
            file.write(script)
        job = self.client.submit(
            [*bed_command("tests.support.fake_commands.node"), self.settings.kind, str(spooled)],
            nodes=submission.nodes,
            walltime=timedelta(seconds=submission.walltime),
            preemptible=submission.queue != QUEUES[0],
            nodelist=submission.nodelist,
            name=submission.name,
            env={**submission.env, "FREETRAIN_FAKE_CPUS": str(self.settings.cpus)},
            stdout=submission.stdout,
            stderr=submission.stderr,
        )
        aside = self.directory / _JOBS / f".{job}"
        aside.write_text(submission.queue, encoding="utf-8")
        aside.rename(self.directory / _JOBS / job)
        return job

    def jobs(self, ids: Sequence[str] | None = None) -> dict[str, FakeJob]:
        """Return all live jobs, and ended ones that were submitted here; or those of `ids`."""
        ours = {path.name: path.read_text(encoding="utf-8") for path in self._job_files()}
        found = self.client.jobs(ours if ids is None else ids)
        if ids is None:
            found = {**found, **self.client.queue()}
        plan = self.client.expected_starts() if found else {}
        jobs = {job: _job(job, info, ours.get(job), plan.get(job)) for job, info in found.items()}
        return dict(sorted(jobs.items(), key=lambda item: int(item[0])))

    def node_jobs(self) -> dict[str, str | None]:
        """Return the job on each node."""
        return {node: info["job"] for node, info in self.client.nodes().items()}

    def _job_files(self) -> list[Path]:
        return [path for path in (self.directory / _JOBS).iterdir() if not path.name.startswith(".")]


def _job(job: str, info: Mapping[str, Any], queue: str | None, plan: Mapping[str, Any] | None) -> FakeJob:
    pending = info["state"] == "PENDING"
    main = info["kind"] == "main"
    return FakeJob(
        id=job,
        name=info["name"],
        user=getpass.getuser() if queue or not main else "main",
        queue=queue or (QUEUES[0] if main else QUEUES[1]),
        state=info["state"],
        reason=info["reason"],
        nodes=tuple(info["nodes"]),
        node_count=info["node_count"],
        walltime=info["walltime"],
        submit=info["submit"],
        start=info["start"],
        end=info["end"],
        ends=info["ends"],
        ending=info["ending"],
        exit_code=next((code for code in info["exit_codes"].values() if code), 0),
        planned_start=plan["start"] if plan and pending else None,
        planned=tuple(plan["nodes"]) if plan and pending else (),
    )


def calls(directory: Path, command: str | None = None) -> list[tuple[float, list[str]]]:
    """List the calls so far, of one command or all: time (s since the epoch) and arguments."""
    file = directory / _CALLS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [(when, words) for when, *words in found if command in (None, words[0])]
