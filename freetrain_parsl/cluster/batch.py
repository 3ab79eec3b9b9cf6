"""The life cycle of jobs: runs the pure scheduler with a real clock and real processes.

Everything happens at an event (a request, a child's exit, a timer), with one time `now` per event: a job that starts
because another one ended is recorded as starting at that time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.cluster import processes, registry
from freetrain_parsl.cluster.accounting import MainRecord, Usage
from freetrain_parsl.cluster.scheduling import Job, PreemptJob, Scheduler, StartJob
from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.cluster.workload import MainJob

logger = logging.getLogger(__name__)

_RECHECK_SECONDS = 0.1  # while a job ends, in case no signal reports an exit
_KILL_AGAIN_SECONDS = 0.2


class JobState(str, Enum):
    """The state of a job; the value is returned by requests."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
    PREEMPTED = "PREEMPTED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True)
class Command:
    """The command that a job runs on each of its nodes, see `ClusterClient.submit`.

    The cluster's own variables are added to `env`.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None
    stdout: Path | None = None
    stderr: Path | None = None


@dataclass
class JobRecord:
    """A job and its state; times are seconds on the cluster's clock."""

    job: Job
    name: str
    command: Command
    submit: float
    planned_run: float
    state: JobState = JobState.PENDING
    reason: str = ""
    start: float | None = None
    end: float | None = None
    nodes: tuple[str, ...] = ()
    exit_codes: dict[str, int] = field(default_factory=dict)
    outcome: JobState | None = None
    """Its state once its processes are gone; set as soon as the job is terminated."""
    leaders: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Node -> the process started there; its id is the session id."""
    occupied: set[str] = field(default_factory=set)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """``main`` or ``preemptible``."""
        return "preemptible" if self.job.preemptible else "main"


@dataclass
class Interval:
    """The interval in which a job holds a node, seconds on the cluster's clock; `end` is ``None`` until it ends."""

    node: str
    job: str
    kind: str
    start: float
    end: float | None = None


class BatchQueue:
    """Queue, nodes and jobs of one cluster.

    The scheduler must not be used by other code; `grace` is in seconds.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        *,
        grace: float,
        workload: Sequence[MainJob] = (),
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.grace = grace
        self.usage = Usage()
        self.history: list[Interval] = []
        self.records: dict[str, JobRecord] = {}
        self.drained = asyncio.Event()
        self._mark_prefix = registry.mark_prefix(name)
        self._loop = loop
        self._zero = loop.time()
        self._epoch = time.time()
        self._live: dict[str, JobRecord] = {}
        self._sessions: dict[int, tuple[JobRecord, str]] = {}
        self._intervals: dict[tuple[str, str], Interval] = {}
        self._idle_since = dict.fromkeys(scheduler.names.names, 0.0)
        self._workload = sorted(workload, key=lambda job: job.submit, reverse=True)
        self._closed = False
        self._await_workload()

    def clock(self) -> float:
        """Return the seconds since the cluster started, in whole microseconds."""
        return round(self._loop.time() - self._zero, 6)

    def epoch(self, seconds: float) -> float:
        """Convert a time of the cluster's clock to seconds since the epoch."""
        return self._epoch + seconds

    # -- requests --------------------------------------------------------------------------------------------

    def submit(
        self,
        command: Command,
        *,
        nodes: int,
        walltime: float,
        preemptible: bool,
        nodelist: Sequence[str] | None = None,
        name: str = "",
    ) -> str:
        """Submit a job and return its id.

        Raises
        ------
        InvalidSettings
            The cluster can never run it.
        """
        if self._closed:
            raise InvalidSettings(f"cluster {self.name!r} is shutting down and accepts no jobs")
        now = self._tick()
        job_id = str(len(self.records) + 1)
        job = Job(job_id, nodes, walltime, preemptible, None if nodelist is None else tuple(nodelist))
        self.scheduler.submit(job)
        self.records[job_id] = JobRecord(job, name or f"job-{job_id}", command, now, planned_run=walltime)
        self._turn(now)
        return job_id

    def cancel(self, job_ids: Sequence[str], reason: str = "cancelled by its owner") -> dict[str, bool]:
        """Terminate jobs; return which of them had not already ended."""
        now = self._tick()
        known = {job_id: self._cancel(job_id, reason, now) for job_id in job_ids}
        self._turn(now)
        return known

    def close(self) -> None:
        """Terminate all jobs and accept no more; `drained` is set once all processes are gone."""
        self._closed = True
        self._workload.clear()
        self.cancel([job_id for job_id, record in self.records.items() if record.end is None], "shutdown")
        if not self._live:
            self.drained.set()

    def usage_so_far(self) -> Usage:
        """Return the node-seconds up to now."""
        self._tick()
        return self.usage

    def windows(self) -> list[tuple[float, float | None, tuple[str, ...]]]:
        """Group the idle nodes by closing time: (opens, closes, nodes). Nodes that close now are omitted."""
        now = self.clock()
        groups: dict[float | None, list[str]] = {}
        for node, closes in self.scheduler.free_until(now).items():
            if closes is None or closes > now:
                groups.setdefault(closes, []).append(node)
        return [
            (max(self._idle_since[node] for node in nodes), closes, tuple(nodes)) for closes, nodes in groups.items()
        ]

    def main_records(self) -> list[MainRecord]:
        """List main jobs in order of submission, without those that were cancelled while pending."""
        return [
            MainRecord(
                record.job.id,
                record.job.nodes,
                record.job.walltime,
                record.submit,
                record.start,
                record.end,
                min(record.planned_run, record.job.walltime),
            )
            for record in self.records.values()
            if not record.job.preemptible and not (record.start is None and record.end is not None)
        ]

    # -- events ----------------------------------------------------------------------------------------------

    def children_exited(self) -> None:
        """Collect exit codes; release jobs and nodes without processes."""
        now = self._tick()
        for pid, code in processes.reap().items():
            if pid in self._sessions:
                record, node = self._sessions[pid]
                record.exit_codes[node] = code
                record.leaders[node].returncode = code  # already reaped: Popen must not wait for it
        self._collect(now)

    def _await_workload(self) -> None:
        if self._workload:
            self._loop.call_at(self._zero + self._workload[-1].submit, self._submit_workload)

    def _submit_workload(self) -> None:
        sleep = shutil.which("sleep") or "sleep"
        while self._workload and self._workload[-1].submit <= self.clock():
            main = self._workload.pop()
            command = Command((sleep, f"{main.run:.6f}"), {"PATH": os.defpath})
            job_id = self.submit(command, nodes=main.nodes, walltime=main.walltime, preemptible=False, name="main")
            self.records[job_id].planned_run = main.run
        self._await_workload()

    def _tick(self) -> float:
        """Begin an event: account for the time since the last one."""
        now = self.clock()
        self.usage.advance(now, self.scheduler.offered_count, self.scheduler.preemptible_count)
        return now

    def _turn(self, now: float) -> None:
        while actions := self.scheduler.schedule(now):
            for action in actions:
                record = self.records[action.job.id]
                if isinstance(action, StartJob):
                    self._start(record, action, now)
                elif isinstance(action, PreemptJob):
                    self._stop(record, JobState.PREEMPTED, f"main job {action.needed_by} needs its nodes", now)

    # -- life cycle ------------------------------------------------------------------------------------------

    def _start(self, record: JobRecord, action: StartJob, now: float) -> None:
        job_id = record.job.id
        record.state, record.start, record.nodes = JobState.RUNNING, now, action.nodes
        record.occupied = set(action.nodes)
        self._live[job_id] = record
        command = record.command
        for node in action.nodes:
            interval = Interval(node, job_id, record.kind, now)
            self._intervals[job_id, node] = interval
            self.history.append(interval)
        for rank, node in enumerate(action.nodes):
            env = {
                **command.env,
                "FREETRAIN_CLUSTER": self.name,
                "FREETRAIN_CLUSTER_JOB_ID": job_id,
                "FREETRAIN_CLUSTER_NODE": node,
                "FREETRAIN_CLUSTER_NODELIST": ",".join(action.nodes),
                "FREETRAIN_CLUSTER_NODE_RANK": str(rank),
                processes.MARK: self._mark(job_id, node),
            }
            try:
                leader = processes.spawn(
                    command.argv, env=env, cwd=command.cwd, stdout=command.stdout, stderr=command.stderr
                )
            except OSError as error:
                logger.warning("job %s: cannot start on %s: %s", job_id, node, error)
                self._stop(record, JobState.FAILED, f"cannot start on {node}: {error}", now)
                self._loop.call_soon(self._recheck, record)
                return
            record.leaders[node] = leader
            self._sessions[leader.pid] = (record, node)
        logger.info("job %s (%s, %s) starts on %s", job_id, record.name, record.kind, ",".join(action.nodes))
        record.timers.append(self._loop.call_later(record.job.walltime, self._walltime_over, record))

    def _walltime_over(self, record: JobRecord) -> None:
        now = self._tick()
        self._stop(record, JobState.TIMED_OUT, "its walltime is over", now)
        self._turn(now)

    def _cancel(self, job_id: str, reason: str, now: float) -> bool:
        record = self.records.get(job_id)
        if record is None or record.end is not None:
            return False
        if self.scheduler.withdraw(job_id):
            record.state, record.reason, record.end = JobState.CANCELLED, reason, now
            logger.info("job %s was withdrawn: %s", job_id, reason)
        else:
            self._stop(record, JobState.CANCELLED, reason, now)
        return True

    def _stop(self, record: JobRecord, outcome: JobState, reason: str, now: float) -> None:
        """Terminate a running job; a second call has no effect."""
        if record.outcome is not None:
            return
        record.outcome, record.reason = outcome, reason
        logger.info("terminating job %s: %s (%s)", record.job.id, outcome.value, reason)
        self.scheduler.ending(record.job.id, now)
        for members in self._members([record]).values():
            processes.terminate(members)
        record.timers.append(self._loop.call_later(self.grace, self._kill, record))
        record.timers.append(self._loop.call_later(_RECHECK_SECONDS, self._recheck, record))

    def _kill(self, record: JobRecord) -> None:
        for members in self._members([record]).values():
            processes.kill(info.pid for info in members)
        record.timers.append(self._loop.call_later(_KILL_AGAIN_SECONDS, self._kill, record))

    def _recheck(self, record: JobRecord) -> None:
        if record.end is None:
            self.children_exited()
        if record.end is None:
            record.timers.append(self._loop.call_later(_RECHECK_SECONDS, self._recheck, record))

    def _collect(self, now: float) -> None:
        """Release jobs and nodes without processes, and kill processes that outlived their job's main process."""
        suspects = [
            record
            for record in self._live.values()
            if record.outcome is not None or len(record.exit_codes) == len(record.nodes)
        ]
        if suspects:
            members = self._members(suspects)
            for record in suspects:
                self._release(record, {node for node in record.occupied if (record.job.id, node) in members}, now)
        self._turn(now)

    def _release(self, record: JobRecord, occupied: set[str], now: float) -> None:
        job_id = record.job.id
        if record.outcome is None:
            failed = {node: code for node, code in record.exit_codes.items() if code}
            outcome = JobState.FAILED if failed else JobState.COMPLETED
            reason = "; ".join(f"exit code {code} on {node}" for node, code in failed.items())
            if occupied:  # left over after the job's own processes have ended, as after a batch script
                self._stop(record, outcome, reason, now)
            else:
                record.outcome, record.reason = outcome, reason
        if occupied and not record.job.preemptible:
            return  # a main job releases all its nodes at once, as in the simulation
        for node in sorted(record.occupied - occupied):
            self.scheduler.released(job_id, node)
            self._intervals.pop((job_id, node)).end = now
            self._idle_since[node] = now
        record.occupied = occupied
        if not occupied:
            self._finish(record, now)

    def _finish(self, record: JobRecord, now: float) -> None:
        assert record.outcome is not None
        record.state, record.end = record.outcome, now
        for timer in record.timers:
            timer.cancel()
        record.timers.clear()
        for leader in record.leaders.values():
            self._sessions.pop(leader.pid, None)
        record.leaders.clear()
        del self._live[record.job.id]
        logger.info("job %s has ended: %s %s", record.job.id, record.state.value, record.reason)
        if self._closed and not self._live:
            self.drained.set()

    def _mark(self, job_id: str, node: str) -> str:
        return f"{self._mark_prefix}{job_id}/{node}"

    def _members(self, records: Sequence[JobRecord]) -> dict[tuple[str, str], list[processes.ProcessInfo]]:
        """(job id, node) -> living processes."""
        keys = {
            self._mark(record.job.id, node): (record.job.id, node) for record in records for node in record.occupied
        }
        sessions = {  # of all jobs, because checking a process of an unknown session costs more
            leader.pid: self._mark(record.job.id, node)
            for record in self._live.values()
            for node, leader in record.leaders.items()
            if node in record.occupied
        }
        return {keys[mark]: found for mark, found in processes.members(sessions).items() if mark in keys}
