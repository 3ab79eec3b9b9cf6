"""The neighbours of `slurm_neighbours.py`: a seeded main queue on a real Slurm, and what became of each of its jobs.

Jobs tell their own start, end and nodes into files: measuring costs the scheduler no query.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.cluster.workload import MainJob, generate_workload
from freetrain_parsl.windows.slurm.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.testing.loopback_slurm import LoopbackSlurm

_LIMIT_SLACK = 10.0  # seconds by which a job's limit exceeds its run at least: none is killed
_PERIOD = 0.1

# What nodes tell the controller of themselves, at intervals of their own.
_NODE_RPCS = ("MESSAGE_NODE_REGISTRATION_STATUS",)
_STATISTICS = "REQUEST_STATS_INFO"  # of which the last is the measurement's own

# What only looks ask.
_LOOKS = re.compile(r"REQUEST_((JOB|JOB_USER|NODE|PARTITION|RESERVATION|BUILD|STATS)_INFO|PING)")


@dataclass(frozen=True)
class Ran:
    """What became of a main job; times in seconds after the workload's beginning."""

    submit: float
    start: float
    end: float
    nodes: tuple[str, ...]

    @property
    def area(self) -> float:
        """Node-seconds."""
        return len(self.nodes) * (self.end - self.start)


def draw(*, nodes: int, minutes: float, load: float, mean_run: float, seed: int) -> list[MainJob]:
    """Draw the workload; Slurm's limits are whole minutes."""
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
    """Submits the workload in time and waits for its end.

    Parameters
    ----------
    cluster
        Whose partition ``main`` it goes to.
    jobs
        The workload, by time of submission.
    user
        Whose jobs they are; ``None`` for whoever runs this.
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
        """Live through the workload; return its jobs in the order of their submission.

        Raises
        ------
        TimeoutError
            The last has not ended in three times the time that a full cluster needs.
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
    """List when each node had no main job, from the workload's beginning to `end`: node, from, until."""
    for node in nodes:
        free_from = 0.0
        for job in sorted((job for job in ran if node in job.nodes), key=lambda job: job.start):
            if job.start > free_from:
                yield node, free_from, job.start
            free_from = max(free_from, job.end)
        if end > free_from:
            yield node, free_from, end


def count_rpcs(cluster: LoopbackSlurm, ran: Sequence[Ran]) -> dict[str, int]:
    """Read from ``sdiag`` who asked slurmctld how often since the last ``sdiag --reset``.

    All that neither the main jobs nor the nodes' daemons caused counts as ours: our looks, our submissions and
    cancellations, and what Slurm itself asks for our jobs and their steps. `rpcs_looks` are the looks alone.
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
    main = 2 * len(ran)  # its submission, and the end of its script
    ours = max(0, total - daemons - main)
    return {
        "rpcs": total,
        "rpcs_main": main,
        "rpcs_nodes": daemons,
        "rpcs_ours": ours,
        "rpcs_looks": looks,
        **by_type,
    }
