"""Effect of our training jobs on other jobs on a real Slurm, and their gain, compared to requeued fixed-size jobs.

The same seeded main queue runs on the same loopback Slurm in each mode:

without
    alone;
again
    alone once more, to measure the variation between two runs;
backfill
    with our training jobs in a partition of low priority whose jobs are not preempted: they must yield by themselves;
preemptible
    with our training jobs in a partition whose jobs are cancelled for those of the main queue, after a grace period;
hidden, hidden-preemptible
    like the previous two, as an ordinary user where other users' jobs are hidden (``PrivateData=jobs``); needs root;
requeue
    with the usual alternative, written with submitit: preemptible jobs of fixed size and time limit that checkpoint and
    are requeued.

Delays are of the main jobs' starts relative to ``without``. The useful share is the node-seconds in training steps that
counted divided by the node-seconds in which a node had no main job for longer than our minimum window: start-up,
minimum useful time and margin. A step mostly sleeps, and a sample costs the same node-seconds on any number of nodes;
``work_share`` uses this cost instead of the actual time of the steps. RPCs are those served by slurmctld; all RPCs not
caused by the main jobs or the nodes' daemons are ours, including those for the steps of our jobs. Looks are our
read-only queries: at most twelve per minute at the default interval. Seeds are run in sequence; the table shows the
median over them, with minimum and maximum.

On a machine with few cores Python and torch start slowly on all nodes of a block at once, unlike on a real cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report
from _slurm_main_queue import MainQueue, Ran, count_rpcs, draw, idle_intervals
from _slurm_training import SAMPLE_NODE_SECONDS

from freetrain_parsl import RateLimits
from freetrain_parsl.report.output import write_figure, write_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.cluster.workload import MainJob

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' Slurm

from tests.support.slurm.loopback import LoopbackPartition, LoopbackSlurm
from tests.support.slurm.slurm_machine import slurm_version

HERE = Path(__file__).parent
HIDING = {"hidden": "backfill", "hidden-preemptible": "preemptible"}  # mode -> the partition of our blocks
MODES = ("without", "again", "backfill", "preemptible", *HIDING, "requeue")
OTHER = "nobody"  # an ordinary user: owner of the main queue, or of our jobs if it is hidden
GRACE = 10  # grace period of the preemptible partitions, seconds
CYCLE = 10  # sites typically have 30 s between scheduler passes; here the queue is compressed
POLL = RateLimits().poll_interval.total_seconds()
PLANNER = {  # seconds
    "startup": 8.0,
    "min_useful": 10.0,
    "closing_margin": 3.0,
    "max_walltime": 1800.0,
    "idle_timeout": 5.0,
    "replan_interval": 10.0,
    "settle": 1.0,
}
NODES_PER_BLOCK = 2  # a block is preempted, and yields, as a whole
SETTLED = 5.0  # seconds until the first main jobs have their nodes; start of the training jobs and of the measurement
MINIMUM = PLANNER["startup"] + PLANNER["min_useful"] + PLANNER["closing_margin"]
PARTITIONS = (
    LoopbackPartition("main", tier=100, default=True),
    LoopbackPartition("backfill"),
    LoopbackPartition("preemptible", preempt="cancel", grace=GRACE),
    LoopbackPartition("requeue", preempt="requeue", grace=GRACE),
)


@dataclass
class Outcome:
    """Run of one mode; times in seconds after the start of the workload."""

    ran: list[Ran]
    rpcs: dict[str, int]
    account: dict[str, Any] = field(default_factory=dict)
    fragments: list[tuple[tuple[str, ...], float, float]] = field(default_factory=list)


def live_through(mode: str, jobs: Sequence[MainJob], options: argparse.Namespace, logs: Path) -> Outcome:
    """Run the main queue once, with the additions of the mode."""
    hides = mode in HIDING
    with LoopbackSlurm(
        nodes=options.nodes,
        partitions=PARTITIONS,
        bf_interval=CYCLE,
        jobs_read_all=hides,
        extra=["PrivateData=jobs"] if hides else [],
    ) as cluster:
        queue = MainQueue(cluster, jobs, OTHER if os.geteuid() == 0 and not hides else None)
        if mode in ("without", "again"):
            cluster.run("sdiag", "--reset")
            ran = queue.run()
            return Outcome(ran, count_rpcs(cluster, ran))
        with _guest(mode, cluster, options, logs) as guest:
            cluster.run("sdiag", "--reset")
            timer = threading.Timer(SETTLED, _tell, (guest, "go"))
            timer.start()
            ran = queue.run()
            end = time.time()
            account = json.loads(_ask(guest, "stop"))
            rpcs = count_rpcs(cluster, ran)
        fragments = [
            (tuple(nodes), start - queue.begin, min(until or end, end) - queue.begin)
            for _, nodes, start, until in account.pop("fragments")
        ]
        return Outcome(ran, rpcs, account, fragments)


@contextmanager
def _guest(
    mode: str, cluster: LoopbackSlurm, options: argparse.Namespace, logs: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start the process of the training jobs, and wait until it is ready."""
    directory = Path(tempfile.mkdtemp(prefix=f"{mode}-", dir=cluster.work))
    settings = {
        "directory": str(directory),
        "partition": HIDING.get(mode, mode),
        "nodes": options.nodes,
        "trainings": options.trainings,
        "planner": PLANNER,
        "nodes_per_block": NODES_PER_BLOCK,
        "poll": options.poll,
        "grace": GRACE / 2,
        "fixed_nodes": options.fixed_nodes,
        "fixed_minutes": options.fixed_minutes,
    }
    script = HERE / ("_slurm_requeue.py" if mode == "requeue" else "_slurm_freetrain.py")
    environment = {**cluster.environment, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = [sys.executable, str(script), json.dumps(settings)]
    if mode in HIDING:
        command = cluster.as_user(OTHER, *command)
        environment["HOME"] = str(directory)
        shutil.chown(directory, OTHER)
    with (logs / f"{mode}.log").open("w", encoding="utf-8") as log:
        guest = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        with guest:
            try:
                if _ask(guest, None) != "ready":
                    raise RuntimeError(f"mode {mode} did not start, see {log.name}")
                yield guest
                guest.wait(120)
            finally:
                guest.kill()
                for name in ("freetrain.log", "journal.sqlite"):
                    for file in directory.rglob(name):
                        shutil.copy(file, logs / f"{mode}-{name}")


def _tell(guest: subprocess.Popen[str], word: str) -> None:
    assert guest.stdin is not None
    guest.stdin.write(f"{word}\n")
    guest.stdin.flush()


def _ask(guest: subprocess.Popen[str], word: str | None) -> str:
    assert guest.stdout is not None
    if word is not None:
        _tell(guest, word)
    return guest.stdout.readline().strip()


def figures(outcome: Outcome, alone: Outcome, nodes: Sequence[str]) -> dict[str, Any]:
    """Summarize a mode: one column of the table."""
    makespan = max(job.end for job in outcome.ran)
    delays = np.array([job.start - same.start for job, same in zip(outcome.ran, alone.ran, strict=True)])
    waits = np.array([job.start - job.submit for job in outcome.ran])
    intervals = ((max(since, SETTLED), until) for _, since, until in idle_intervals(outcome.ran, nodes, makespan))
    areas = [until - since for since, until in intervals if until > since]
    worth = sum(area for area in areas if area >= MINIMUM)
    account = outcome.account
    useful = account["step_node_seconds"] / worth if account and worth else None
    work = account["samples"] * SAMPLE_NODE_SECONDS / worth if account and worth else None
    return {
        "main_jobs": len(outcome.ran),
        "delay_s_median": float(np.median(delays)),
        "delay_s_p99": float(np.percentile(delays, 99)),
        "delay_s_max": float(delays.max()),
        "delay_s_mean": float(delays.mean()),
        "wait_s_mean": float(waits.mean()),
        "makespan_s": makespan,
        "utilisation": sum(job.area for job in outcome.ran) / (makespan * len(nodes)),
        "idle_node_s": sum(areas),
        "idle_node_s_worth": worth,
        "useful_share": useful,
        "work_share": work,
        "samples_lost": account.get("samples_lost"),
        "rpcs": outcome.rpcs["rpcs"],
        "rpcs_ours": outcome.rpcs["rpcs_ours"] if account else 0,
        "rpcs_ours_per_minute": outcome.rpcs["rpcs_ours"] / makespan * 60 if account else 0.0,
        "looks_per_minute": outcome.rpcs["rpcs_looks"] / makespan * 60 if account else 0.0,
        "rpc_share": outcome.rpcs["rpcs_ours"] / outcome.rpcs["rpcs"] if account else 0.0,
    }


def plot(outcomes: dict[str, Outcome], nodes: Sequence[str], file: Path) -> None:
    """Draw the delays, and the jobs on each node over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [mode for mode in MODES if mode in outcomes]
    alone = outcomes["without"]
    figure, axes = plt.subplots(len(shown) + 1, 1, figsize=(11, 2.2 * (len(shown) + 1)), layout="constrained")
    for mode in shown[1:]:
        pairs = zip(outcomes[mode].ran, alone.ran, strict=True)
        delays = sorted(job.start - same.start for job, same in pairs)
        axes[0].step(delays, np.arange(1, len(delays) + 1) / len(delays), where="post", label=mode)
    axes[0].axvline(CYCLE, color="0.7", linestyle=":", label="one scheduler cycle")
    axes[0].set(xlabel="start of a main job relative to 'without' (s)", ylabel="share of main jobs")
    axes[0].legend(fontsize="small")
    rows = {name: row for row, name in enumerate(nodes)}
    for axis, mode in zip(axes[1:], shown, strict=True):
        for job in outcomes[mode].ran:
            for name in job.nodes:
                axis.barh(rows[name], job.end - job.start, left=job.start, height=0.9, color="0.6", linewidth=0)
        for names, start, until in outcomes[mode].fragments:
            for name in names:
                axis.barh(rows[name], until - start, left=start, height=0.5, color="tab:green", linewidth=0)
        axis.set(title=f"{mode}: main jobs grey, training jobs green", ylabel="node", xlabel="seconds")
    write_figure(file, figure)


def run_seed(seed: int, options: argparse.Namespace, logs: Path) -> dict[str, Outcome]:
    """Run one main queue in every mode."""
    jobs = draw(nodes=options.nodes, minutes=options.minutes, load=options.load, mean_run=options.mean_run, seed=seed)
    outcomes = {}
    for mode in ("without", *options.modes):
        began = time.time()
        outcomes[mode] = live_through(mode, jobs, options, logs)
        told = {"account": outcomes[mode].account, "rpcs": outcomes[mode].rpcs}
        print(f"seed {seed}, {mode}: {time.time() - began:.0f} s, {told}", file=sys.stderr, flush=True)
    return outcomes


def spread(values: Sequence[float | None]) -> str | None:
    """Format the median of some values, with minimum and maximum if they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    middle, least, most = (f"{value:.3g}" for value in (float(np.median(known)), min(known), max(known)))
    return middle if least == most else f"{middle} ({least} to {most})"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="length of the main queue (default 15)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the cluster (default 8)")
    parser.add_argument("--load", type=float, default=0.65, help="load of the main queue (default 0.65)")
    parser.add_argument("--mean-run", type=float, default=60.0, help="mean run time of main jobs, seconds (default 60)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of the main queues, run in sequence")
    parser.add_argument("--poll", type=float, default=POLL, help=f"seconds between polls (default {POLL:g})")
    parser.add_argument("--trainings", type=int, default=4, help="concurrent training jobs (default 4)")
    parser.add_argument("--fixed-nodes", type=int, default=2, help="nodes of a requeued job (default 2)")
    parser.add_argument("--fixed-minutes", type=int, default=5, help="time limit of a requeued job (default 5)")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:], help="modes besides 'without'")
    parser.add_argument("--logs", type=Path, default=None, help="directory of the logs (default: a temporary one)")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="write the picture to this file (PNG)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write figures by mode to this file")
    options = parser.parse_args()
    if (missing := LoopbackSlurm.missing()) is not None:
        parser.error(missing)
    if os.geteuid() != 0:
        options.modes = [mode for mode in options.modes if mode not in HIDING]
    logs = options.logs or Path(tempfile.mkdtemp(prefix="neighbours-"))
    logs.mkdir(exist_ok=True)
    nodes = [f"node{number:02d}" for number in range(1, options.nodes + 1)]
    found: list[dict[str, dict[str, Any]]] = []
    for seed in options.seeds:
        outcomes = run_seed(seed, options, logs)
        found.append({mode: figures(outcome, outcomes["without"], nodes) for mode, outcome in outcomes.items()})
        if options.json is not None:
            by_seed = dict(zip(options.seeds, found, strict=False))  # those run so far
            write_output(options.json, json.dumps(by_seed, indent=2) + "\n")
    modes = ("without", *options.modes)
    rows = [
        {"figure": key, **{mode: spread([one[mode][key] for one in found]) for mode in modes}}
        for key in found[0]["without"]
    ]
    report("Neighbours of our training jobs on a real Slurm", rows, ["parsl", "submitit", "torch"])
    major, minor = slurm_version()
    print(
        f"Slurm {major}.{minor:02}: {options.nodes} nodes on the loopback, scheduler cycle {CYCLE} s, grace {GRACE} s;"
    )
    print(f"polls every {options.poll:g} s; minimum window {MINIMUM:g} s; logs in {logs}")
    if options.plot is not None:
        plot(outcomes, nodes, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
