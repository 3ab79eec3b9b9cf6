"""Accounting of a cluster: idle and used node-seconds, and delays of main jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.scheduling import simulate
from freetrain_parsl.cluster.workload import MainJob

if TYPE_CHECKING:
    from collections.abc import Sequence

_TICKS = 1_000_000  # the simulation uses integer microseconds, so that equal times stay equal


@dataclass
class Usage:
    """Node-seconds so far; numbers of nodes are constant between calls to `advance`."""

    time: float = 0.0
    offered: float = 0.0
    """Not held by main jobs."""
    preemptible: float = 0.0
    """Of these, held by preemptible jobs until their processes were gone."""

    def advance(self, now: float, offered: int, preemptible: int) -> None:
        """Add the time from the last call until `now` with these numbers of nodes."""
        self.offered += offered * (now - self.time)
        self.preemptible += preemptible * (now - self.time)
        self.time = now


@dataclass(frozen=True)
class MainRecord:
    """The record of a main job; seconds on the cluster's clock."""

    id: str
    nodes: int
    walltime: float
    submit: float
    start: float | None
    end: float | None
    planned_run: float  # as long as it has not ended


@dataclass(frozen=True)
class Delay:
    """A main job's start relative to the same queue without preemptible jobs, seconds.

    `start` is ``None`` for a job that is still pending although it would have started; its delay is that so far.
    """

    job_id: str
    submit: float
    expected_start: float
    start: float | None
    delay: float


def delays(records: Sequence[MainRecord], nodes: int, now: float) -> list[Delay]:
    """Compare main jobs with `simulate` for the same submissions and their actual run times.

    Without preemptible jobs the delays are exactly zero, because the cluster starts a job at the time of the event
    that allowed it, and a job's run time includes the overhead of starting and collecting it. With preemptible jobs, a
    delay is the time that their processes took to end, including its consequences.
    """

    def ticks(seconds: float) -> int:
        return round(seconds * _TICKS)

    queue = []
    for record in records:
        if record.start is not None and record.end is not None:
            run = ticks(record.end) - ticks(record.start)
        elif record.start is not None:
            run = max(ticks(record.planned_run), ticks(now) - ticks(record.start))
        else:
            run = ticks(record.planned_run)
        queue.append(MainJob(ticks(record.submit), record.nodes, run, ticks(record.walltime)))
    found = []
    for record, expected in zip(records, simulate(queue, nodes), strict=True):
        start = expected / _TICKS
        if record.start is not None:
            delay = (ticks(record.start) - expected) / _TICKS
        elif start < now:
            delay = now - start
        else:
            continue
        found.append(Delay(record.id, record.submit, start, record.start, delay))
    return found
