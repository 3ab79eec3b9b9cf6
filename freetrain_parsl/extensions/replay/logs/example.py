"""Small example inputs for ``freetrain replay``, one of each kind."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.scheduling import simulate
from freetrain_parsl.cluster.workload import MainJob, generate_workload
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.logs.idle_log import IDLE_HEADER
from freetrain_parsl.extensions.replay.logs.job_log import JobLog, RecordedJob

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_example"]

_NODES = 32
_LENGTH = timedelta(hours=6)
_MEAN_RUN = timedelta(minutes=15)
_SEED = 20210210
_BEGIN = datetime.fromisoformat("2026-01-05T08:00:00")

_TRAINERS_YAML = """\
# Trainers of a replay. Times are seconds, rates samples per second; see the reference for all keys.
- name: vision              # a built-in model: its measured curve, and its costs of rescaling
  max: 16
  curve: resnet18
  work: 200000000           # samples, then it is done
- name: search              # eight trainers, search-0 to search-7, without end
  count: 8
  max: 8
  curve: shufflenet
- name: language            # your own measurements: nodes, samples per second
  submit: 3600
  min: 2
  max: 16
  curve: {2: 410, 4: 790, 8: 1450, 16: 2500}
  rescale: {up: 25, down: 10, start: 60}
  work: 15000000
"""

_TRAINERS_CSV = """\
name,submit,min,max,work,curve,rescale,count
vision,0,1,16,200000000,resnet18,,1
search,0,1,8,endless,shufflenet,,8
language,3600,2,16,15000000,2:410;4:790;8:1450;16:2500,up:25;down:10;start:60,1
"""

_ADAPTERS_YAML = """\
# One member of a fine-tuning sweep, for sweep:40xadapters.yaml: it has one node, and takes 42 min alone.
- name: lora
  max: 1
  curve: {1: 100}
  work: 250000
"""


def write_example(folder: Path) -> list[Path]:
    """Write example inputs: ``idle.csv``, ``jobs.swf``, ``sacct.txt``, and lists of trainers.

    The logs are of the same fictitious machine of 32 nodes, for six hours; ``trainers.yaml`` and ``trainers.csv`` are
    equivalent, ``adapters.yaml`` has a member of a sweep.

    Raises
    ------
    InvalidInput
        One of them already exists (nothing is overwritten), or they cannot be written.
    """
    log = _invent()
    texts = {
        "idle.csv": _idle_csv(log),
        "jobs.swf": _swf(log),
        "sacct.txt": _sacct(log),
        "trainers.yaml": _TRAINERS_YAML,
        "trainers.csv": _TRAINERS_CSV,
        "adapters.yaml": _ADAPTERS_YAML,
    }
    files = [folder / name for name in texts]
    if existing := [str(file) for file in files if file.exists()]:
        raise InvalidInput(f"{', '.join(existing)} already exists and is not overwritten; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, texts.values(), strict=True):
            with file.open("x", encoding="utf-8") as new:  # no link of another user is followed
                new.write(text)
    except OSError as error:
        raise InvalidInput(f"{folder}: the example cannot be written: {error}") from error
    return files


def _invent() -> JobLog:
    """Simulate jobs of typical sizes and lengths on a cluster."""
    jobs = [
        MainJob(round(job.submit), job.nodes, max(1, round(job.run)), math.ceil(job.walltime / 60) * 60)
        for job in generate_workload(nodes=_NODES, duration=_LENGTH, seed=_SEED, load=1.0, mean_run=_MEAN_RUN)
    ]
    starts = simulate(jobs, _NODES)
    return JobLog(
        "example",
        [
            RecordedJob(str(number), job.submit, start, start + job.run, job.nodes, job.walltime)
            for number, (job, start) in enumerate(zip(jobs, starts, strict=True), start=1)
        ],
        _NODES,
    )


def _idle_csv(log: JobLog) -> str:
    holes = (hole for change in log.changes() for hole in change.opened)
    lines = (f"{hole.node},{hole.start:.0f},{hole.end:.0f}" for hole in holes)
    return "\n".join(["# idle intervals of a fictitious machine, seconds", IDLE_HEADER, *lines, ""])


def _swf(log: JobLog) -> str:
    lines = (
        f"{job.where} {job.submit:.0f} {job.began - job.submit:.0f} {job.end - job.began:.0f} {job.nodes} -1 -1 "
        f"{job.nodes} {job.walltime:.0f} -1 1 -1 -1 -1 -1 -1 -1 -1"
        for job, _ in log.placements()
    )
    return "\n".join(["; Version: 2.2", "; Computer: a fictitious machine", f"; MaxNodes: {_NODES}", *lines, ""])


def _sacct(log: JobLog) -> str:
    lines = ["JobID|Submit|Start|End|NNodes|Timelimit|State|NodeList"]
    for job, nodes in log.placements():
        times = "|".join((_BEGIN + timedelta(seconds=time)).isoformat() for time in (job.submit, job.began, job.end))
        numbers = ",".join(node.removeprefix("node") for node in nodes)
        limit = timedelta(seconds=job.walltime or 0)
        lines.append(f"{job.where}|{times}|{job.nodes}|{limit}|COMPLETED|node[{numbers}]")
    return "\n".join([*lines, ""])
