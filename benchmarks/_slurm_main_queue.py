"""The neighbours of `slurm_neighbours.py`: a seeded main queue on a real Slurm, and the outcome of each of its jobs.

Jobs write their start, end and nodes to files: the measurement needs no scheduler queries.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.workload import MainJob, generate_workload
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.slurm.loopback import LoopbackSlurm

_LIMIT_SLACK = 10.0  # minimum seconds by which a job's limit exceeds its run time: none is killed
_PERIOD = 0.1

# Reports of the nodes to the controller, at their own intervals.
_NODE_RPCS = ("MESSAGE_NODE_REGISTRATION_STATUS",)
_STATISTICS = "REQUEST_STATS_INFO"  # the last one is by the measurement itself

# Only from polls.
_LOOKS = re.compile(r"REQUEST_((JOB|JOB_USER|NODE|PARTITION|RESERVATION|BUILD|STATS)_INFO|PING)")


@dataclass(frozen=True)
class Ran:
    """Outcome of a main job; times in seconds after the start of the workload."""

    submit: float
    start: float
    end: float
    nodes: tuple[str, ...]

    @property
    def area(self) -> float:
        """Return the node-seconds."""
        return len(self.nodes) * (self.end - self.start)


def draw(*, nodes: int, minutes: float, load: float, mean_run: float, seed: int) -> list[MainJob]:
    """Draw a random workload; Slurm's limits are whole minutes."""
    jobs = generate_workload(
        nodes=nodes,
        duration=timedelta(minutes=minutes),
        load=load,
        mean_run=timedelta(seconds=mean_run),
        seed=seed,
    )
    return [
        MainJob(job.submit, job.nodes, job.run, 60.0 * math.ceil(max(job.walltime, job.run + _LIMIT_SLACK) / 60.0))
        for job in jobs
    ]


class MainQueue:
    """Submits the workload on time and waits for its end.

    Parameters
    ----------
    cluster
        Cluster with the partition ``main``.
    jobs
        The workload, by time of submission.
    user
        Owner of the jobs; ``None``: the current user.
    """

    def __init__(self, cluster: LoopbackSlurm, jobs: Sequence[MainJob], user: str | None) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._files = cluster.work / "main"
        self._files.mkdir()
        self._files.chmod(0o1777)
        self._user = user
        self.begin = 0.0

    def run(self) -> list[Ran]:
        """Run the workload; return its jobs in submission order.

        Raises
        ------
        TimeoutError
            The last has not ended within three times the time that a full cluster needs.
        """
        self.begin = time.time()
        patience = 600.0 + 3 * sum(job.walltime for job in self._jobs)
        for number, job in enumerate(self._jobs):
            time.sleep(max(0.0, self.begin + job.submit - time.time()))
            file = self._files / str(number)
            command = (
                f"echo $(date +%s.%N) $SLURM_JOB_NODELIST > {file}.start; sleep {job.run};"
                f" date +%s.%N > {file}.new; mv {file}.new {file}.end"
            )
            self._cluster.submit(
                "--partition=main",
                "--exclusive",
                f"--nodes={job.nodes}",
                f"--time={int(job.walltime / 60)}",
                f"--job-name=main-{number}",
                "--no-requeue",
                command=command,
                user=self._user,
            )
        while len(list(self._files.glob("*.end"))) < len(self._jobs):
            if time.time() > self.begin + patience:
                raise TimeoutError("the main queue does not end")
            time.sleep(_PERIOD)
        return [self._ran(number, job) for number, job in enumerate(self._jobs)]

    def _ran(self, number: int, job: MainJob) -> Ran:
        start, nodes = (self._files / f"{number}.start").read_text(encoding="ascii").split()
        end = (self._files / f"{number}.end").read_text(encoding="ascii")
        return Ran(job.submit, float(start) - self.begin, float(end) - self.begin, tuple(expand_hosts(nodes)))


def idle_intervals(ran: Sequence[Ran], nodes: Sequence[str], end: float) -> Iterator[tuple[str, float, float]]:
    """List the periods without main jobs, from the start of the workload to `end`: node, from, until."""
    for node in nodes:
        free_from = 0.0
        for job in sorted((job for job in ran if node in job.nodes), key=lambda job: job.start):
            if job.start > free_from:
                yield node, free_from, job.start
            free_from = max(free_from, job.end)
        if end > free_from:
            yield node, free_from, end


def count_rpcs(cluster: LoopbackSlurm, ran: Sequence[Ran]) -> dict[str, int]:
    """Read the RPC counts of slurmctld by origin since the last ``sdiag --reset`` from ``sdiag``.

    All RPCs not caused by the main jobs or the nodes' daemons count as ours: our polls, submissions and cancellations,
    and Slurm's own RPCs for our jobs and their steps. `rpcs_looks` are the polls only.
    """
    by_type = {
        name: int(count)
        for name, count in re.findall(r"^\s+(\w+)\s+\(\s*\d+\) count:(\d+)", cluster.run("sdiag"), re.MULTILINE)
        if name.isupper()
    }
    if _STATISTICS in by_type:
        by_type[_STATISTICS] -= 1
    total = sum(by_type.values())
    looks = sum(count for name, count in by_type.items() if _LOOKS.fullmatch(name))
    daemons = sum(by_type.get(name, 0) for name in _NODE_RPCS)
    main = 2 * len(ran)  # submission, and end of script
    ours = max(0, total - daemons - main)
    return {
        "rpcs": total,
        "rpcs_main": main,
        "rpcs_nodes": daemons,
        "rpcs_ours": ours,
        "rpcs_looks": looks,
        **by_type,
    }
