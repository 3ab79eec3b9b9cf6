"""The same training jobs in the same holes, by FreeTrain and by what is used otherwise, on a real Slurm on loopback.

The same seeded main queue runs for each way, and leaves holes of seconds to minutes. Eight training jobs need about as
many node-seconds as it leaves. Each way has the script that its documentation recommends for preemptible nodes, in
``benchmarks/peers``:

freetrain
    a campaign with the site file of ``freetrain init``, whose times are divided by six, as the queue is compressed;
submitit
    jobs of one node with a ``checkpoint`` method;
torchrun
    elastic jobs of one to four nodes that save snapshots;
lightning
    jobs of one node with ``SLURMEnvironment(auto_requeue=True)`` and a stateful loader;
ray
    Ray Train with ``num_workers=(1, 4)`` on a Ray cluster of preemptible jobs;
array
    an array of jobs without checkpoints: the floor.

The packages of the other ways have an environment of their own, of the same Python and torch:
``python -m venv DIR; DIR/bin/pip install torch==… submitit lightning torchdata 'ray[train]'``, given as
``--python DIR/bin/python``.

All is measured from outside, in the same manner, from a few seconds after the start of the main queue until the time at
which it would end if it were perfectly packed (``--minutes``). Processes record which samples they have trained; main
jobs record their nodes and times; slurmctld records each stay of a batch job on its nodes, and counts requests.

useful_per_offered
    node-seconds of different samples that were trained, of those in which a node had no main job. A sample that was
    trained again counts once, also if a process lost the first time with what it had not saved: this favours ways that
    repeat. Nothing counts that ended without a saved state (``array``) and before its training job was finished;
held_per_offered
    the share of them in which a node had a job of ours;
start_s
    median seconds from the start of a batch job until a training function begins on one of its nodes;
repeated_per_held
    node-seconds of samples that were trained again or in vain, of those held;
delay_s_max, delay_s_mean
    of the main jobs' starts, relative to a run without any training job. Slurm's passes fall differently in each run:
    the way ``none``, which trains nothing, shows how much of this is chance;
requests_per_minute
    served by slurmctld and not caused by main jobs or nodes;
batch_jobs_failed
    batch jobs that ended with an error, and are not requeued: a signal before Python handles it ends a job;
queue_length
    our batch jobs in the queue at the same time, at most;
samples_outside
    samples that were trained on nodes that the way did not hold, by processes that outlived their batch job: such a
    run does not count;
loss_gap, loss_spread
    worst final loss of a finished job less the median of undisturbed runs with five orders of the data, and the spread
    of those;
environment_calls_per_start, directory_calls_per_node_minute
    with ``--trace``, in runs of their own: file system calls on Python, its packages and this repository for each node
    of a batch job that started, and on the checkpoints and records for each minute that a node was held;
left_after_kill
    our jobs in the queue a minute after ``kill -9`` of all processes outside Slurm, if there were any.

FreeTrain's own account (``freetrain report``) is compared with these: ``journal_samples`` and ``journal_held`` are its
figures divided by those from outside.

A full comparison takes hours. With ``--json FILE`` it can run in pieces: runs that the file has are not repeated. The
table shows medians with their ranges, the file each run.
Steps mostly sleep (`_peers_workload`). On a machine with few cores, Python and torch start slowly on all nodes at once,
unlike on a real cluster; this costs each way its share, and those that start most processes most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from _peers_account import read_held, read_report, shares
from _peers_calls import count_calls
from _peers_spread import by_way, plot, spread
from _peers_ways import Request
from _peers_workload import jobs_of
from _report import machine, report
from _slurm_main_queue import MainQueue, Ran, count_rpcs, draw, idle_intervals

from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.cluster.workload import MainJob

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' Slurm

from tests.support.slurm.loopback import LoopbackPartition, LoopbackSlurm

HERE = Path(__file__).parent
MODULES = {  # way -> what its script imports that FreeTrain's environment may lack
    "none": (),
    "freetrain": (),
    "submitit": ("submitit",),
    "torchrun": (),
    "lightning": ("lightning", "torchdata"),
    "ray": ("ray.train",),
    "array": (),
}
WAYS = tuple(way for way in MODULES if way != "none")
MARK = "FREETRAIN_PEERS_SIDE"  # environment variable of all processes of a way
GRACE = 10  # seconds that a preempted job has
CYCLE = 10  # seconds between passes of the scheduler
SETTLED = 5.0  # seconds until the first main jobs have their nodes; start of the training jobs and of the measurement
PATIENCE = 60.0  # seconds that a way has to end by itself after `kill -9`
PARTITION = "preemptible"
PARTITIONS = (
    LoopbackPartition("main", tier=100, default=True),
    LoopbackPartition(PARTITION, preempt="requeue", grace=GRACE),
)
PACKAGES = ("torch", "submitit", "lightning", "torchdata", "ray")
_NOT_KEPT = shutil.ignore_patterns("sockets", "*.sock", "calls")
SETTINGS = ("nodes", "minutes", "load", "mean_run", "work", "limit")


class Way:
    """The submitting side of one way, in a process of its own."""

    def __init__(self, way: str, cluster: LoopbackSlurm, request: Request, python: str, log: Path) -> None:
        paths = [str(HERE), str(HERE.parent)]
        self._mark = f"{MARK}={request.directory}"
        self.environment = {
            **cluster.environment,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            MARK: request.directory,
        }
        self._command = [python, str(HERE / "peers" / f"with_{way}.py"), str(request.file)]
        self._directory, self._log = request.directory, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Submit the training jobs."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self.environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self) -> bool:
        """Kill its processes outside Slurm's jobs, as a failing login node does; return whether there were any."""
        assert self._process is not None
        self._process.poll()
        pids = self._outside()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if pids:
            self._process.wait()
        return bool(pids)

    def _outside(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                except OSError:  # it has ended, or belongs to another user
                    continue
                if self._mark in variables and not any(line.startswith("SLURM_JOB_ID=") for line in variables):
                    found.append(int(entry.name))
        return found


def live_through(
    way: str | None, main_jobs: Sequence[MainJob], work: float, seed: int, options: argparse.Namespace
) -> tuple[list[Ran], dict[str, Any]]:
    """Run the main queue once, alone or with training jobs of one way that need `work` node-seconds.

    Return its jobs, and the way's figures; without a way, the node-seconds offered.
    """
    home = Path(tempfile.mkdtemp(prefix=f"peers-{way or 'none'}-"))
    batch_jobs = home / "jobs.txt"
    calls = home / "calls" if options.trace else None
    recorded = ["JobCompType=jobcomp/filetxt", f"JobCompLoc={batch_jobs}"]
    logs = options.logs / f"{way}-{seed}"
    try:
        if calls is not None:
            calls.mkdir()
        with LoopbackSlurm(
            nodes=options.nodes, partitions=PARTITIONS, bf_interval=CYCLE, trace=calls, extra=recorded
        ) as cluster:
            queue = MainQueue(cluster, main_jobs, None)
            cluster.run("sdiag", "--reset")
            if way is None:
                ran = queue.run()
                return ran, {"offered_node_s": sum(b - a for _, a, b in _offered(ran, cluster.node_names, options))}
            jobs = jobs_of(work)
            longest = max(options.limit, 2 * int(options.minutes))
            request = Request(str(home), PARTITION, options.limit, longest, "127.0.0.1", jobs)
            request.write()
            python = sys.executable if way == "freetrain" else options.python
            guest = Way(way, cluster, request, python, options.logs / f"{way}-{seed}.log")
            threading.Timer(SETTLED, guest.start).start()
            ran = queue.run()
            lasted = time.time() - queue.begin
            rpcs = count_rpcs(cluster, ran)
            left = None
            killed = time.time()
            if guest.kill():
                time.sleep(PATIENCE)
                left = len(cluster.run("squeue", "--noheader", f"--partition={PARTITION}").splitlines())
            cluster.clear(180.0)
            nodes = cluster.node_names
        horizon = options.minutes * 60
        idle = [(node, queue.begin + a, queue.begin + b) for node, a, b in _offered(ran, nodes, options)]
        # Those that end afterwards may do so because their submitting side was killed.
        until_killed = [stay for stay in read_held(batch_jobs, PARTITION) if stay.start <= killed]
        stays = [stay if stay.end <= killed else replace(stay, state="") for stay in until_killed]
        figures = {
            **shares(home, jobs, stays, idle, queue.begin + horizon, saves=way != "array"),
            "requests_per_minute": rpcs["rpcs_ours"] / lasted * 60,
            "lines": _lines(HERE / "peers" / f"with_{way}.py"),
            "left_after_kill": left,
        }
        if calls is not None:
            environment = (*_prefixes(python), str(HERE.parent))
            of_environment, of_directory = count_calls(calls, environment, str(home))
            figures["environment_calls_per_start"] = of_environment / sum(
                len(stay.nodes) for stay in stays if stay.start
            )
            figures["directory_calls_per_node_minute"] = of_directory / figures["held_node_s"] * 60
        if way == "freetrain":
            figures |= _compare_journal(home, guest, shares(home, jobs, stays, idle, killed), stays, killed)
        return ran, figures
    finally:
        if way is not None:
            shutil.copytree(home, logs, dirs_exist_ok=True, ignore=_NOT_KEPT)
        shutil.rmtree(home, ignore_errors=True)


def _offered(ran: Sequence[Ran], nodes: Sequence[str], options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Return where and when a node had no main job: node, begin and end, seconds since the queue's begin."""
    horizon = options.minutes * 60
    spans = [(node, max(a, SETTLED), min(b, horizon)) for node, a, b in idle_intervals(ran, nodes, horizon)]
    return [span for span in spans if span[2] > span[1]]


def _compare_journal(
    home: Path, guest: Way, outside: dict[str, Any], stays: Sequence[Any], killed: float
) -> dict[str, Any]:
    """Divide the figures of FreeTrain's journal, which ends when it is killed, by those from outside until then."""
    own = read_report(home, str(Path(sys.executable).parent / "freetrain"), guest.environment)
    held = sum(stay.node_seconds(0.0, killed) for stay in stays if stay.start)
    return {
        "journal_samples": own["samples"] / outside["trained_samples"] if outside["trained_samples"] else None,
        "journal_held": own["held_node_seconds"] / held if held else None,
        "journal_lost": own["samples_lost"],
        "journal_repeated": own["duplicate_samples"],
    }


def _lines(file: Path) -> int:
    """Return the lines of a script without blank lines, comments and its description."""
    body = file.read_text(encoding="utf-8").split('"""', 2)[2]
    return sum(bool(line.strip()) and not line.strip().startswith("# ") for line in body.splitlines())


class Results:
    """What has been measured so far, in a file to which later calls add.

    Parameters
    ----------
    file
        The file; ``None``: in memory only.
    versions
        Of the other ways' packages.
    settings
        Of the main queue and the work: a file has runs of the same settings and versions only.

    Raises
    ------
    SystemExit
        The file has others.
    """

    def __init__(self, file: Path | None, versions: dict[str, str], settings: dict[str, Any]) -> None:
        self._file = file
        self.versions = versions
        self.alone: dict[str, list[float]] = {}
        self.offered: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self._settings = settings
        if file is not None and file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            for name, value in (("settings", settings), ("versions", versions)):
                if known[name] != value:
                    raise SystemExit(f"{file}: measured with {name} {known[name]}, not {value}; give another file")
            self.alone, self.offered, self.rows = known["alone"], known["offered"], known["rows"]

    def has(self, way: str, seed: int) -> bool:
        """Return whether a run is known."""
        return any(row["way"] == way and row["seed"] == seed for row in self.rows)

    def save(self) -> None:
        """Write the file."""
        if self._file is not None:
            known = {
                "settings": self._settings,
                "versions": self.versions,
                "alone": self.alone,
                "offered": self.offered,
                "rows": self.rows,
            }
            write_output(self._file, json.dumps(known, indent=2) + "\n")


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=MODULES, default=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the main queue (default 1 2 3)")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the main queue (default 20)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the cluster (default 8)")
    parser.add_argument("--load", type=float, default=0.65, help="load of the main queue (default 0.65)")
    parser.add_argument("--mean-run", type=float, default=60.0, help="mean run time of main jobs, seconds (default 60)")
    parser.add_argument(
        "--work", type=float, default=1.0, help="work of the training jobs per offered time (default 1)"
    )
    parser.add_argument("--limit", type=int, default=20, help="time limit of batch jobs, minutes (default 20)")
    parser.add_argument("--trace", action="store_true", help="count file system calls, which takes time from the nodes")
    parser.add_argument("--python", default=sys.executable, help="Python of the environment of the other ways")
    parser.add_argument("--logs", type=Path, default=None, help="directory of logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="file of the results, to be added to")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="picture of the results")
    options = parser.parse_args()
    if (missing := LoopbackSlurm.missing() or _missing(options)) is not None:
        parser.error(missing)
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="peers-logs-"))
    options.logs.mkdir(exist_ok=True, parents=True)
    settings = {name: getattr(options, name) for name in SETTINGS} | ({"trace": True} if options.trace else {})
    results = Results(options.json, _versions(options.python), settings)
    for seed in options.seeds:
        for way in options.ways:
            if not results.has(way, seed):
                _measure(way, seed, results, options)
    seeds = len({row["seed"] for row in results.rows})
    title = f"ways to train in idle nodes: medians and ranges of {seeds} queues; logs in {options.logs}"
    report(title, spread(results.rows), ["freetrain-parsl", "torch"])
    print(f"of the other ways: {', '.join(f'{name} {number}' for name, number in results.versions.items())}")
    _compare(results.rows)
    if options.plot is not None:
        plot(results.rows, options.plot)
    return 0


def _missing(options: argparse.Namespace) -> str | None:
    if options.trace and shutil.which("strace") is None:
        return "--trace needs strace (Debian: strace)"
    names = [module for way in options.ways for module in MODULES[way]]
    lines = [f"import {name}" for name in ("torch", *names)]
    done = subprocess.run([options.python, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    return f"{options.python}: {done.stderr.strip().splitlines()[-1]}; --help says how to make its environment"


def _versions(python: str) -> dict[str, str]:
    code = (
        "import json, sys, importlib.metadata as m\n"
        "known = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({name: known[name] for name in sys.argv[1:] if name in known}))"
    )
    done = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _prefixes(python: str) -> tuple[str, ...]:
    code = "import sys; print(sys.prefix, sys.base_prefix, sep=chr(10))"
    return tuple(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")[:2]
    )


def _measure(way: str, seed: int, results: Results, options: argparse.Namespace) -> None:
    main_jobs = draw(
        nodes=options.nodes, minutes=options.minutes, load=options.load, mean_run=options.mean_run, seed=seed
    )
    if str(seed) not in results.alone:
        ran, figures = live_through(None, main_jobs, 0.0, seed, options)
        results.alone[str(seed)] = [job.start for job in ran]
        results.offered[str(seed)] = figures["offered_node_s"]
        results.save()
    work = options.work * results.offered[str(seed)]
    ran, figures = live_through(None if way == "none" else way, main_jobs, work, seed, options)
    delays = [job.start - start for job, start in zip(ran, results.alone[str(seed)], strict=True)]
    row = {"way": way, "seed": seed, **figures, "delay_s_max": max(delays), "delay_s_mean": mean(delays)}
    row["machine"] = machine()  # the pieces of a comparison may run on several, with several states of this repository
    row["commit"] = _commit()
    print(row, file=sys.stderr, flush=True)
    if figures.get("samples_outside"):
        print(f"{way}, seed {seed}: not counted, processes outlived their batch jobs", file=sys.stderr)
        return
    results.rows.append(row)
    results.save()


def _commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    medians = {way: median(values) for way, values in by_way(rows, "useful_per_offered").items()}
    ours = medians.pop("freetrain", None)
    if ours is not None and medians:
        best = max(medians, key=lambda way: medians[way])
        if medians[best]:
            ratio = ours / medians[best]
            print(f"useful per offered, median: {ours:.3f}, {ratio:.2f} x the best other way ({best})")


if __name__ == "__main__":
    sys.exit(main())
