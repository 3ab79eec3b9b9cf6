"""Reader of workloads: which jobs are submitted when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.extensions.simulate.jobs.csv_rows import read_rows
from freetrain_parsl.planning.model import CostsInSeconds

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from freetrain_parsl.extensions.simulate.application import Application

__all__ = ["JobRequest", "read_workload"]

_COSTS = CostsInSeconds(up=30.0, down=30.0, start=30.0)  # as in Pollux' simulator
_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True)
class JobRequest:
    """A job as its user submits it.

    Parameters
    ----------
    name
        Unique in the workload.
    time
        When it is submitted, seconds.
    application
        What it trains.
    gpus, batch
        The GPUs and the global batch that its user asks for.
    least
        The fewest GPUs that it runs on.
    costs
        Seconds that it stands still when its GPUs change.
    """

    name: str
    time: float
    application: Application
    gpus: int
    batch: int
    least: int = 1
    costs: CostsInSeconds = _COSTS


def read_workload(file: Path, applications: Mapping[str, Application], gpus: int) -> tuple[JobRequest, ...]:
    """Read a workload, ordered by submission.

    Parameters
    ----------
    file
        CSV with the columns ``name,time,application,num_replicas,batch_size``.
    applications
        Name -> application.
    gpus
        Size of the cluster.

    Raises
    ------
    InvalidInput
        The file cannot be read or contains something invalid; the message names the file and the line.
    """
    jobs: dict[str, JobRequest] = {}
    for row in read_rows(file, _COLUMNS):
        name, wanted = row.text("name"), row.text("application")
        if name in jobs:
            raise row.wrong(f"a job {name!r} already exists; names must be unique")
        application = applications.get(wanted)
        if application is None:
            known = ", ".join(sorted(applications))
            raise row.wrong(f"unknown application {wanted!r}{did_you_mean(wanted, applications)}; available: {known}")
        job = JobRequest(name, row.number("time"), application, row.count("num_replicas"), row.count("batch_size"))
        if job.gpus > gpus:
            raise row.wrong(f"job {name!r} asks for {job.gpus} GPUs, the cluster has {gpus}")
        if job.batch > application.limits.largest:
            raise row.wrong(
                f"job {name!r}: batch {job.batch} is more than the {application.limits.largest} of {wanted!r}"
            )
        jobs[name] = job
    if not jobs:
        raise InvalidInput(f"{file}: contains no jobs")
    return tuple(sorted(jobs.values(), key=lambda job: job.time))
