"""The main queue, which keeps the nodes of an embedded cluster busy.

`generate_workload` generates one from published models, `read_workload` reads one from a job log in Standard Workload
Format.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from freetrain_parsl.cluster.swf import SwfLog
from freetrain_parsl.errors import InvalidInput, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ROUND_WALLTIMES = (0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40)
"""In units of the mean run time: a few round values, as specified by users (Tsafrir et al. 2005, §4)."""

_SHORTEST_RUN = 0.05  # s; starting a process takes a millisecond or more
_LONGEST_RUN = 4.0  # in mean run times, so that a demonstration sees jobs end


@dataclass(frozen=True)
class MainJob:
    """A job of the main queue.

    Parameters
    ----------
    submit
        When it is submitted, seconds after the workload's beginning.
    nodes
        Number of nodes.
    run
        Actual run time, seconds.
    walltime
        Requested walltime, seconds.
    """

    submit: float
    nodes: int
    run: float
    walltime: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.submit) and self.submit >= 0 and self.nodes >= 1):
            raise InvalidSettings(f"a main job needs a submit time of 0 s or later and a node, got {self!r}")
        if not (math.isfinite(self.run) and self.run >= 0 and 0 < self.walltime < math.inf):
            raise InvalidSettings(f"a main job needs a run time and a positive walltime, got {self!r}")


def generate_workload(
    *,
    nodes: int = 8,
    duration: timedelta = timedelta(minutes=2),
    seed: int = 0,
    load: float = 0.75,
    mean_run: timedelta = timedelta(seconds=20),
) -> list[MainJob]:
    """Generate a random main queue; the same arguments give the same queue.

    Sizes and run times follow Lublin and Feitelson, "The workload on parallel supercomputers: modeling the
    characteristics of rigid jobs", JPDC 63(11), 2003: a share of serial jobs, a two-stage uniform
    distribution of the size's logarithm with most sizes powers of two, and a hyper-gamma distribution of the
    run time's logarithm whose mix depends on the size. Simplified for queues of minutes on few nodes: the
    spread of the logarithm is reduced to a third, run times are scaled to `mean_run` and limited to four times that,
    and the daily cycle of arrivals is omitted (a Poisson process with a given number of jobs).

    Walltimes are overestimates: one job in seven runs to its limit, for the others the used share is uniform
    (Mu'alem and Feitelson, IEEE TPDS 12(6), 2001), and the limit is rounded up to one of few round values
    (Tsafrir, Etsion and Feitelson, "Modeling user runtime estimates", JSSPP 2005).

    Parameters
    ----------
    nodes
        Size of the cluster.
    duration
        Length of the queue. Jobs to fill the cluster are submitted at the start, the others within this time.
    seed
        Seed of the random numbers.
    load
        Node-seconds of all jobs relative to those of the cluster in `duration`.
    mean_run
        Mean run time.

    Raises
    ------
    InvalidSettings
        An argument is out of range.
    """
    if nodes < 1 or duration <= timedelta(0) or mean_run <= timedelta(0) or not 0 <= load < math.inf:
        raise InvalidSettings("a workload needs nodes, a duration, a mean run time and a load of zero or more")
    rng = random.Random(seed)
    length, mean = duration.total_seconds(), mean_run.total_seconds()
    work_left = load * nodes * length
    # The scale is measured on a separate long sample, so that the number of jobs drawn later does not affect it.
    sample = [_log_run(rng, _size(rng, nodes)) for _ in range(2000)]
    scale = mean * len(sample) / sum(math.exp(value) for value in sample)
    shapes: list[tuple[int, float, float]] = []
    while work_left > 0:
        size = _size(rng, nodes)
        run = min(scale * math.exp(_log_run(rng, size)), _LONGEST_RUN * mean)
        run = round(max(run, _SHORTEST_RUN), 3)
        shapes.append((size, run, _walltime(rng, run, mean)))
        work_left -= size * run
    # The last job to be submitted ends, on average, with the queue.
    submits = sorted(rng.uniform(0.0, max(length - mean, length / 2)) for _ in shapes)
    jobs, filled = [], 0
    for submit, (size, run, walltime) in zip(submits, shapes, strict=True):
        jobs.append(MainJob(round(submit, 3) if filled >= nodes else 0.0, size, run, walltime))
        filled += size
    return jobs


def _size(rng: random.Random, nodes: int) -> int:
    """Sample a size from Lublin and Feitelson, table 6: serial share, two-stage uniform, powers of two."""
    if nodes == 1 or rng.random() < 0.244:
        return 1
    high = math.log2(nodes)
    low = min(0.8, high / 4)
    middle = max(high - 2.5, (low + high) / 2)
    logarithm = rng.uniform(low, middle) if rng.random() < 0.86 else rng.uniform(middle, high)
    size = 2 ** round(logarithm) if rng.random() < 0.576 / (1 - 0.244) else round(2**logarithm)
    return max(1, min(nodes, size))


def _log_run(rng: random.Random, size: int) -> float:
    """Sample a run time's logarithm from Lublin and Feitelson, table 7, with its spread reduced to a third."""
    short = max(0.0, min(1.0, -0.0054 * size + 0.78))
    value = rng.gammavariate(4.2, 0.94) if rng.random() < short else rng.gammavariate(312.0, 0.03)
    return value / 3.0


def _walltime(rng: random.Random, run: float, mean: float) -> float:
    if rng.random() < 1 / 7:
        return run
    asked = run / rng.uniform(0.1, 1.0) / mean
    position = min(bisect_left(_ROUND_WALLTIMES, asked), len(_ROUND_WALLTIMES) - 1)
    return _ROUND_WALLTIMES[position] * mean


def read_workload(
    path: Path,
    *,
    nodes: int = 8,
    compression: float = 1.0,
    start: timedelta = timedelta(0),
    duration: timedelta | None = None,
    fit: Literal["scale", "clip"] = "scale",
    seed: int = 0,
    lenient: bool = False,
) -> list[MainJob]:
    """Read a main queue from a job log in Standard Workload Format.

    Jobs that were running or pending at `start` are submitted immediately, running ones with their remaining times, so
    that the cluster is as busy from the beginning as the logged one was. Without a requested time, the run time is
    used as the walltime; jobs that exceeded their requested time get their run time.

    Parameters
    ----------
    path
        The log, ``.swf`` or ``.swf.gz``.
    nodes
        Size of the cluster.
    compression
        Seconds of the log per second.
    start, duration
        The part of the log to use, in the log's own time after its first job; ``None`` for all the rest.
    fit
        ``scale`` scales sizes by the ratio of the clusters' sizes, rounded up or down at random so that the load is
        preserved; jobs rounded to zero are omitted. ``clip`` limits sizes to `nodes`.
    seed
        Seed of that rounding.
    lenient
        Skip malformed lines instead of rejecting the log.

    Raises
    ------
    InvalidInput
        The log cannot be read, a line is malformed, or the log does not contain the size of its cluster.
    InvalidSettings
        The compression or the number of nodes is not positive.
    """
    if not (nodes >= 1 and 0 < compression < math.inf):
        raise InvalidSettings(f"nodes and compression must be positive, got {nodes} and {compression}")
    log = SwfLog(path, lenient=lenient)
    ratio = nodes / log.nodes if fit == "scale" else 1.0
    rng = random.Random(seed)
    length = math.inf if duration is None else duration.total_seconds()
    begin: float | None = None
    jobs = []
    for job in log:
        if job.run <= 0:
            continue
        if begin is None:
            begin = job.submit + start.total_seconds()  # some logs count from 1970
        if job.submit >= begin + length:
            continue
        draw = rng.random()
        size = min(nodes, int(job.nodes * ratio + draw) if fit == "scale" else job.nodes)
        elapsed = max(0.0, begin - job.submit - job.wait) if job.submit < begin else 0.0
        if size < 1 or elapsed >= job.run:
            continue
        walltime = max(job.requested_time or job.run, job.run)
        jobs.append(
            MainJob(
                max(0.0, job.submit - begin) / compression,
                size,
                max((job.run - elapsed) / compression, _SHORTEST_RUN),
                max((walltime - elapsed) / compression, _SHORTEST_RUN),
            )
        )
    return sorted(jobs, key=lambda job: job.submit)


def save_workload(jobs: Iterable[MainJob], path: Path) -> None:
    """Write a main queue to a file: JSON, one [submit, nodes, run, walltime] per job."""
    rows = [[job.submit, job.nodes, job.run, job.walltime] for job in jobs]
    path.write_text(json.dumps(rows), encoding="utf-8")


def load_workload(path: Path) -> list[MainJob]:
    """Read a file written by `save_workload`.

    Raises
    ------
    InvalidInput
        The file cannot be read or is not a saved workload.
    """
    try:
        return [MainJob(*row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"{path} is not a saved workload: {error}") from error
