"""The same training jobs in the same holes, by FreeTrain and by what is used otherwise, on a real Slurm on loopback.

The same seeded main queue runs for each way, and leaves holes of seconds to minutes. Eight training jobs need about as
many node-seconds as it leaves. Each way has the script that its documentation recommends for preemptible nodes, in
``benchmarks/peers``:

freetrain
    a campaign with the site file of ``freetrain init``, whose times are divided by six, as the queue is compressed;
submitit
    jobs of one node with a ``checkpoint`` method;
torchrun
    elastic jobs of one to four nodes with a snapshot in each epoch;
lightning
    jobs of one node with ``SLURMEnvironment(auto_requeue=True)``;
ray
    Ray Train with ``num_workers=(1, 4)`` on a Ray cluster of preemptible jobs (``pip install "ray[train]"``);
array
    an array of jobs without checkpoints: the floor.

All is measured from outside, in the same manner: processes record which samples they have trained; main jobs record
their nodes and times; slurmctld records the jobs of each way when they end, and counts requests. ``useful_per_offered``
is the node-seconds of different samples that were trained, divided by those in which a node had no main job;
``held_per_offered`` is the share of them in which a node had a job of ours. Delays are of the main jobs' starts,
relative to a run without any training job. ``jobs_left`` are jobs in the queue half a minute after ``kill -9`` of what
submitted them; for ways whose submitting side ends by itself there is nothing to kill.

Steps mostly sleep (`_peers_workload`). On a machine with few cores, Python and torch start slowly on all nodes at once,
unlike on a real cluster; this costs each way its share.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _peers_ways import Request
from _peers_workload import SAMPLE_SECONDS, jobs_of, read_records, undisturbed_loss
from _report import report
from _slurm_main_queue import MainQueue, Ran, count_rpcs, draw, idle_intervals

from freetrain_parsl.report.output import write_output
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.cluster.workload import MainJob

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' Slurm

from tests.support.slurm.loopback import LoopbackPartition, LoopbackSlurm

HERE = Path(__file__).parent
WAYS = ("freetrain", "submitit", "torchrun", "lightning", "ray", "array")
GRACE = 10  # seconds that a preempted job has
CYCLE = 10  # seconds between passes of the scheduler
SETTLED = 5.0  # seconds until the first main jobs have their nodes; start of the training jobs and of the measurement
MINUTES = 5  # time limit of jobs that save their state
PATIENCE = 30.0  # seconds that a way has to end by itself after `kill -9`
PARTITIONS = (
    LoopbackPartition("main", tier=100, default=True),
    LoopbackPartition("preemptible", preempt="requeue", grace=GRACE),
)


@dataclass(frozen=True)
class Held:
    """A job of a way on its nodes, from slurmctld's own record; times in seconds since the epoch."""

    submit: float
    start: float
    end: float
    nodes: tuple[str, ...]


def read_held(file: Path) -> list[Held]:
    """Read the jobs of the training partition from the records of Slurm's ``jobcomp/filetxt``."""
    held = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields.get("Partition") != "preemptible" or fields["NodeList"] in ("", "(null)"):
            continue
        submit, start, end = (_time_of(fields[name]) for name in ("SubmitTime", "StartTime", "EndTime"))
        held.append(Held(submit, start, end, tuple(expand_hosts(fields["NodeList"]))))
    return held


def _time_of(text: str) -> float:
    return 0.0 if text in ("Unknown", "None") else datetime.fromisoformat(text).timestamp()


class Way:
    """The submitting side of one way, in a process of its own."""

    def __init__(self, way: str, cluster: LoopbackSlurm, request: Request, python: str, log: Path) -> None:
        paths = [str(HERE), str(HERE.parent)]
        self._environment = {**cluster.environment, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._command = [python, str(HERE / "peers" / f"with_{way}.py"), str(request.file)]
        self._directory, self._log = request.directory, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Submit the training jobs."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=self._directory, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> bool:
        """Kill it as a failing host does; return whether it was still there."""
        assert self._process is not None
        there = self._process.poll() is None
        if there:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return there


def live_through(
    way: str | None, main_jobs: Sequence[MainJob], seed: int, options: argparse.Namespace
) -> tuple[list[Ran], dict[str, Any]]:
    """Run the main queue once, alone or with the training jobs of one way; return its jobs, and the way's figures."""
    home = Path(tempfile.mkdtemp(prefix=f"peers-{way}-"))
    finished_jobs = home / "jobs.txt"
    recorded = ["JobCompType=jobcomp/filetxt", f"JobCompLoc={finished_jobs}"]
    try:
        with LoopbackSlurm(nodes=options.nodes, partitions=PARTITIONS, bf_interval=CYCLE, extra=recorded) as cluster:
            queue = MainQueue(cluster, main_jobs, None)
            if way is None:
                return queue.run(), {}
            idle = (1 - options.load) * options.nodes * options.minutes * 60
            jobs = jobs_of(options.work * idle)
            longest = max(MINUTES, 1 + int(max(job.node_seconds for job in jobs) * 1.5 / 60))
            request = Request(str(home), "preemptible", MINUTES, longest, "127.0.0.1", jobs)
            request.write()
            python = options.ray_python if way == "ray" else sys.executable
            guest = Way(way, cluster, request, python, options.logs / f"{way}-{seed}.log")
            cluster.run("sdiag", "--reset")
            threading.Timer(SETTLED, guest.start).start()
            ran = queue.run()
            end = time.time()
            rpcs = count_rpcs(cluster, ran)
            left = 0
            if guest.kill():
                time.sleep(PATIENCE)
                left = len(cluster.run("squeue", "--noheader", "--partition=preemptible").splitlines())
            cluster.clear(180.0)
            nodes = cluster.node_names
        idle_times = [(node, max(a, SETTLED), b) for node, a, b in idle_intervals(ran, nodes, end - queue.begin)]
        offered = sum(b - a for _, a, b in idle_times if b > a)
        held = read_held(finished_jobs)
        return ran, {
            **_shares(request, held, offered, end),
            "requests_per_minute": rpcs["rpcs_ours"] / (end - queue.begin) * 60,
            "jobs_at_once": _at_once(held),
            "lines": _lines(HERE / "peers" / f"with_{way}.py"),
            "jobs_left": left,
        }
    finally:
        if way is not None:
            shutil.copytree(home, options.logs / f"{way}-{seed}", dirs_exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)


def _shares(request: Request, held: Sequence[Held], offered: float, end: float) -> dict[str, Any]:
    directory = Path(request.directory)
    counts = [read_records(directory, job, end) for job in request.jobs]
    gaps = [
        json.loads(file.read_text(encoding="utf-8"))["loss"] - undisturbed_loss(job)
        for job in request.jobs
        if (file := directory / f"{job.name}.finished").exists()
    ]
    node_seconds = sum(len(job.nodes) * max(0.0, min(job.end, end) - job.start) for job in held if job.start < end)
    useful = sum(count["useful"] for count in counts) * SAMPLE_SECONDS
    return {
        "useful_per_offered": useful / offered,
        "held_per_offered": node_seconds / offered,
        "useful_per_held": useful / node_seconds if node_seconds else None,
        "finished": len(gaps),
        "samples_repeated": sum(count["repeated"] for count in counts),
        "samples_lost": sum(count["lost"] for count in counts),
        "loss_gap": max(gaps, default=None),
    }


def _at_once(held: Sequence[Held]) -> int:
    """Return how many of the recorded jobs were in the queue at the same time, at most."""
    return max((sum(job.submit <= one.submit < job.end for job in held) for one in held), default=0)


def _lines(file: Path) -> int:
    """Return the lines of a script without blank lines, comments and its description."""
    text = re.sub(r'^""".*?"""', "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.strip().startswith("# ") for line in text.splitlines())


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the main queue (default 1 2 3)")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the main queue (default 20)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the cluster (default 8)")
    parser.add_argument("--load", type=float, default=0.65, help="load of the main queue (default 0.65)")
    parser.add_argument("--mean-run", type=float, default=60.0, help="mean run time of main jobs, seconds (default 60)")
    parser.add_argument("--work", type=float, default=1.0, help="work of the training jobs per idle time (default 1)")
    parser.add_argument("--ray-python", default=sys.executable, help="Python of an environment with ray[train]")
    parser.add_argument("--logs", type=Path, default=None, help="directory of logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    if (missing := LoopbackSlurm.missing()) is not None:
        parser.error(missing)
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="peers-"))
    options.logs.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        main_jobs = draw(
            nodes=options.nodes, minutes=options.minutes, load=options.load, mean_run=options.mean_run, seed=seed
        )
        alone, _ = live_through(None, main_jobs, seed, options)
        for way in options.ways:
            ran, figures = live_through(way, main_jobs, seed, options)
            delays = [job.start - same.start for job, same in zip(ran, alone, strict=True)]
            rows.append({"way": way, "seed": seed, **figures, "delay_s_max": max(delays)})
            print(rows[-1], file=sys.stderr, flush=True)
            if options.json is not None:
                write_output(options.json, json.dumps(rows, indent=2) + "\n")
    packages = ["freetrain-parsl", "torch", "submitit", "lightning", "ray"]
    report(f"ways to train in idle nodes; logs in {options.logs}", rows, packages, options.json)
    _compare(rows, options.ways)
    return 0


def _compare(rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> None:
    shares = {way: median(row["useful_per_offered"] for row in rows if row["way"] == way) for way in ways}
    if others := {way: share for way, share in shares.items() if way != "freetrain"}:
        best = max(others, key=lambda way: others[way])
        if "freetrain" in shares and others[best]:
            ratio = shares["freetrain"] / others[best]
            print(f"useful per offered, median: {shares['freetrain']:.3f}, {ratio:.2f} x the best other way ({best})")


if __name__ == "__main__":
    sys.exit(main())
