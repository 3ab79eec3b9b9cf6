"""Holes of a machine from its job log: nodes not held by a job were idle, and forecasts follow from the queue.

If the log does not contain nodes, a job gets the first free ones in order of name. The number of idle nodes does not
depend on this rule, but how long each one stays idle does.

Forecasts are what a batch system would have planned at that instant (`freetrain_parsl.cluster.plan.Plan`): running
jobs end with their requested walltime, and waiting ones start in order of submission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice, repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from freetrain_parsl.cluster.plan import Plan
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.holes import Change, HoleLog, HoleTable, refuse_forecasts
from freetrain_parsl.windows.hostlist import expand_hosts, natural_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

__all__ = ["JobLog", "RecordedJob"]

_PLAN_DEPTH = 100
"""How many waiting jobs a forecast considers, as in the embedded cluster."""

_UNKNOWN_WALLTIME = 86_400.0
"""Seconds; assumed walltime of jobs without one, until the log contains a walltime."""

_CLIPPED_AT_MOST = 0.01
"""Share of the jobs that may find too few free nodes before the size of the machine is considered wrong."""

# Kinds of events, in the order in which those of the same instant are processed. Jobs that leave at the instant of
# their start, or without one, come last.
_ENDED, _SUBMITTED, _STARTED, _LEFT = range(4)


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job in a log.

    Parameters
    ----------
    where
        The log and line (or job), for messages.
    submit
        When it was submitted, seconds.
    start
        When it got its nodes; ``None`` if it was cancelled or the log ended before.
    end
        When it released them (possibly the instant of its start) or left the queue without any; infinity if the log
        ended before.
    nodes
        How many nodes it had or requested.
    walltime
        Requested seconds; ``None`` if unknown.
    hosts
        Its nodes, as a host list; ``None`` if unknown.
    """

    where: str
    submit: float
    start: float | None
    end: float
    nodes: int
    walltime: float | None = None
    hosts: str | None = None

    @property
    def began(self) -> float:
        """The start of a job that ran."""
        assert self.start is not None
        return self.start


class JobLog(HoleLog):
    """The holes left by the jobs of a log.

    A log lacks the jobs that ended before its beginning and those that started after its end, so that the machine looks
    empty at both. Holes are therefore taken from the first end of a job to the last start of one, between which all
    running jobs are known; or, if that is less than half of a (short) log, from its first start to its last end.

    Parameters
    ----------
    lenient
        Accept a log in which jobs held more nodes at once than exist.
    epoch
        The date of zero on the log's clock, if known.

    Attributes
    ----------
    clipped : int
        Jobs that found too few free nodes and were given those available. Logs round their times, so that some jobs
        overlap; the log is rejected if it is more than one in a hundred, or if a job is larger than the machine.

    Raises
    ------
    InvalidInput
        No job ran; or jobs held more nodes at once, or more distinct ones, than exist.
    """

    def __init__(
        self,
        name: str,
        jobs: Iterable[RecordedJob],
        nodes: int,
        *,
        lenient: bool = False,
        epoch: datetime | None = None,
    ) -> None:
        self.name, self.nodes = name, nodes
        self._jobs = sorted(jobs, key=lambda job: job.submit)
        self._ran = sorted((job for job in self._jobs if job.start is not None), key=lambda job: job.began)
        if not self._ran:
            raise InvalidInput(f"{name}: contains no job that ran")
        self.zero_length = sum(job.end == job.began for job in self._ran)
        self.has_forecasts = any(job.walltime is not None for job in self._ran)
        self.start, self.end = self._known_span()
        self.date = _date(epoch, self.start)
        self._names = self._name_nodes()
        self._index = {node: index for index, node in enumerate(self._names)}
        self.table = self._find_holes(lenient=lenient).within(self.start, self.end)

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        if not forecasts:
            return self.table.changes(before=self.end)
        if not self.has_forecasts:
            raise refuse_forecasts(self.name)
        return self._forecast_changes()

    def placements(self) -> Iterator[tuple[RecordedJob, tuple[str, ...]]]:
        """Yield the jobs that ran, in order of start, each with the names of its nodes."""
        for job, nodes, _ in self._placed():
            yield job, tuple(self._names[node] for node in nodes.tolist())

    # -- holes ---------------------------------------------------------------------------------------------------

    def _known_span(self) -> tuple[float, float]:
        first_start, last_start = self._ran[0].began, self._ran[-1].began
        ends = [job.end for job in self._ran if job.end < math.inf]
        first_end, last_end = min(ends, default=math.inf), max([last_start, *ends])
        if last_end <= first_start:
            raise InvalidInput(f"{self.name}: it covers no time: all jobs started at once and none has ended")
        if last_start - first_end < (last_end - first_start) / 2:
            return first_start, last_end
        return first_end, last_start

    def _name_nodes(self) -> list[str]:
        """Name all nodes of the machine: first those in the log, in natural order."""
        hostlists = {job.hosts for job in self._ran if job.hosts is not None}
        seen = {host for hosts in hostlists for host in expand_hosts(hosts)}
        if len(seen) > self.nodes:
            raise InvalidInput(
                f"{self.name}: its jobs ran on {len(seen)} distinct nodes, more than the machine's {self.nodes}; "
                f"give a size of {len(seen)} or more"
            )
        digits = len(str(self.nodes - 1))
        numbered = (f"node{number:0{digits}d}" for number in range(self.nodes))
        others = [name for name in numbered if name not in seen]
        return [*sorted(seen, key=natural_order), *others[: self.nodes - len(seen)]]

    def _placed(self) -> Iterator[tuple[RecordedJob, npt.NDArray[np.intp], npt.NDArray[np.float64]]]:
        """Yield the jobs that ran, in order of start, each with its nodes and since when each node had been free."""
        held_until = np.full(self.nodes, -np.inf)
        for job in self._ran:
            if job.hosts is not None:
                nodes = np.array([self._index[host] for host in expand_hosts(job.hosts)], np.intp)
            else:
                nodes = np.flatnonzero(held_until <= job.began)[: job.nodes]
            free_since = held_until[nodes]
            held_until[nodes] = np.maximum(free_since, job.end)  # nodes listed in the log may be shared by jobs
            yield job, nodes, free_since

    def _find_holes(self, *, lenient: bool) -> HoleTable:
        """Find the holes between jobs on each node, including those before the first and after the last job."""
        nodes, starts, ends = [], [], []
        clipped = []
        held_until = np.full(self.nodes, -np.inf)
        for job, placed, free_since in self._placed():
            if len(placed) < job.nodes and job.end > job.began:
                clipped.append((job, len(placed)))
            idle = free_since < job.began
            nodes.append(placed[idle].astype(np.int32))
            starts.append(free_since[idle])
            ends.append(np.full(len(nodes[-1]), job.began))
            held_until[placed] = np.maximum(free_since, job.end)
        self.clipped = len(clipped)
        if clipped and not lenient:
            self._check_clipped(clipped)
        return HoleTable.sorted(
            self._names,
            np.concatenate([*nodes, np.arange(self.nodes, dtype=np.int32)]),
            np.concatenate([*starts, held_until]),
            np.concatenate([*ends, np.full(self.nodes, np.inf)]),
        )

    def _check_clipped(self, clipped: Sequence[tuple[RecordedJob, int]]) -> None:
        for job, placed in clipped:
            if job.nodes > self.nodes or len(clipped) > _CLIPPED_AT_MOST * len(self._ran):
                raise InvalidInput(
                    f"{job.where}: it started on {job.nodes} nodes when only {placed} of {self.nodes} were free; "
                    "give the correct size of the machine, or read leniently to give it only those"
                )

    # -- forecasts -----------------------------------------------------------------------------------------------

    def _forecast_changes(self) -> Iterator[Change]:
        events, placed = self._events(), self._placed()
        done = 0
        system = _BatchSystem(self._names)
        holes = self.table.changes(before=self.end)
        next_change = next(holes, None)
        idle = np.zeros(self.nodes, bool)
        instants = np.union1d([time for time, _, _ in events], self.table.times())
        for now in instants[(instants >= self.start) & (instants < self.end)].tolist():
            while done < len(events) and events[done][0] <= now:
                _, kind, number = events[done]
                done += 1
                if kind == _SUBMITTED:
                    system.submit(number, self._jobs[number])
                elif kind == _STARTED:
                    job, nodes, _ = next(placed)
                    system.start(number, job, nodes)
                else:
                    system.end(number)
            change = Change(now, (), ())
            if next_change is not None and next_change.time == now:
                change, next_change = next_change, next(holes, None)
                idle[[self._index[node] for node in change.closed]] = False
                idle[[self._index[hole.node] for hole in change.opened]] = True
            expected, due = system.closings(now, idle)
            yield replace(change, expected=expected, due=due)

    def _events(self) -> list[tuple[float, int, int]]:
        """List (time, kind, index of the job) in order; starts are in the order of `_placed`."""
        events = []
        for number, job in enumerate(self._jobs):
            events.append((job.submit, _SUBMITTED, number))
            if job.start is not None:
                events.append((job.start, _STARTED, number))
            if job.end < math.inf:
                held = job.start is not None and job.start < job.end
                events.append((job.end, _ENDED if held else _LEFT, number))
        return sorted(events)


def _date(epoch: datetime | None, seconds: float) -> datetime | None:
    try:
        return None if epoch is None else epoch + timedelta(seconds=seconds)
    except OverflowError:  # not a valid date
        return None


class _BatchSystem:
    """The state of the machine's batch system: running and waiting jobs with their walltimes."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._running: dict[int, tuple[float, int]] = {}  # expected end, nodes
        self._waiting: dict[int, RecordedJob] = {}
        self._longest = 0.0

    def submit(self, number: int, job: RecordedJob) -> None:
        self._longest = max(self._longest, job.walltime or 0.0)
        self._waiting[number] = job

    def start(self, number: int, job: RecordedJob, nodes: npt.NDArray[np.intp]) -> None:
        held = np.zeros(len(self._names), bool)
        held[nodes] = True
        del self._waiting[number]
        self._running[number] = (job.began + self._walltime(job), _to_set(held))

    def end(self, number: int) -> None:
        """Remove a running or waiting job."""
        if self._running.pop(number, None) is None:
            del self._waiting[number]

    def closings(self, now: float, idle: npt.NDArray[np.bool_]) -> tuple[dict[str, float | None], frozenset[str]]:
        """Return when the plan needs each idle node, and the nodes that it needs now; see `Change`."""
        expected: dict[str, float | None] = {}
        due: frozenset[str] = frozenset()
        if not idle.any():
            return expected, due
        releases, busy = [], 0
        for end, nodes in sorted(self._running.values(), reverse=True):
            releases.append((end, nodes & ~busy))  # a shared node is free after the last of its jobs
            busy |= nodes
        plan = Plan(now, ((1 << len(self._names)) - 1) & ~busy, releases)
        for job in islice(self._waiting.values(), _PLAN_DEPTH):
            plan.reserve(job.where, min(job.nodes, len(self._names)), self._walltime(job))
        for time, nodes in plan.closings(_to_set(idle)):
            names = self._to_names(nodes)
            if time == now:
                due = frozenset(names)
                expected.update(dict.fromkeys(due))
            else:
                expected.update(zip(names, repeat(time), strict=False))
        return expected, due

    def _walltime(self, job: RecordedJob) -> float:
        return job.walltime or self._longest or _UNKNOWN_WALLTIME

    def _to_names(self, nodes: int) -> Iterator[str]:
        data = np.frombuffer(nodes.to_bytes(len(self._names) // 8 + 1, "little"), np.uint8)
        return map(self._names.__getitem__, np.flatnonzero(np.unpackbits(data, bitorder="little")).tolist())


def _to_set(nodes: npt.NDArray[np.bool_]) -> int:
    """Convert a mask to a set of nodes as in `freetrain_parsl.cluster.nodesets`."""
    return int.from_bytes(np.packbits(nodes, bitorder="little").tobytes(), "little")
