"""Goodput on recorded idle nodes: the share of the offered node-time that is used for training.

An idle log is replayed, compressed, on an embedded cluster: main jobs occupy its nodes when those of the log were busy,
and arrive unannounced, so that our blocks are preempted. Training jobs of one to `--most` nodes share the idle nodes; a
step mostly sleeps, and takes half the time on twice the nodes. goodput is the node-seconds in training steps that count
divided by the node-seconds in windows of at least `--least` seconds; shorter ones are not offered. ``work`` is
stricter: it uses the steps' nominal cost instead of their time on a machine whose cores are shared by all nodes.

Without ``--idle-log`` (CSV ``node,start,end``, a job log, the output of ``sacct``), a seeded log modelled on Summit's
is drawn. ``--json FILE`` saves ``goodput``, ``offered_node_seconds``, ``useful_node_seconds``, and the rest by cause.

All nodes are processes of this machine, so their imports of torch share its cores, unlike on a real cluster. The share
of ``starting`` is therefore pessimistic, and largest where many windows open together.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import parsl
from _goodput_account import draw_up
from _goodput_log import choose_windows, main_queue, synthetic_log
from _goodput_training import BATCH, SAMPLE_NODE_SECONDS, SAMPLES, make_app
from _report import report
from parsl.config import Config

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, PlannerSettings, RateLimits, TrainingSettings
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.report.output import write_output
from freetrain_parsl.report.projection.run import RunState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _goodput_log import Window

TARGET = 0.90
LEAD = 15.0  # seconds in which all nodes are busy: the driver starts
GRACE = timedelta(seconds=5)
PLANNER = PlannerSettings(
    startup=timedelta(seconds=8),
    min_useful=timedelta(seconds=15),
    closing_margin=timedelta(seconds=3),
    max_walltime=timedelta(hours=1),
    idle_timeout=timedelta(seconds=10),
    settle=timedelta(seconds=1),
    replan_interval=timedelta(seconds=5),
    max_nodes_per_block=1,  # a block is preempted as a whole
)


def measure(options: argparse.Namespace, windows: Sequence[Window], directory: Path) -> dict[str, Any]:
    """Run the replay; return the figures."""
    seconds = 60.0 * options.minutes
    provider = EmbeddedClusterProvider(
        nodes=options.nodes,
        workload=tuple(main_queue(windows, nodes=options.nodes, seconds=seconds, lead=LEAD)),
        cluster_dir=str(directory / "cluster"),
        grace=GRACE,
    )
    executor = FreeTrainExecutor(
        provider=provider,
        policy=options.policy,
        planner=PLANNER,
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=1), submissions_per_minute=120),
        checkpoint_dir=directory / "checkpoints",
        grace=GRACE,
    )
    config = Config(executors=[executor], run_dir=str(directory / "parsl"), strategy="none", initialize_logging=False)
    with parsl.load(config):
        cluster = provider.ensure_started()
        usage = cluster.usage()
        begin = usage["time"] - usage["elapsed"] + LEAD
        train = make_app(options.most)
        for number in range(options.trainings):
            train.options(name=f"training-{number}")(batch=BATCH, cost=SAMPLE_NODE_SECONDS, samples=SAMPLES)
        if time.time() > begin:
            raise RuntimeError(f"the driver took more than {LEAD:g} s to start: the machine is too busy")
        time.sleep(begin + seconds - time.time())
        end = time.time()
        run = RunState(executor.journal_path).refresh()
        history = cluster.history()
    progress = [training.progress for training in run.trainings.values()]
    failed = [f"{training.name}: {training.error}" for training in run.trainings.values() if training.error]
    if failed:
        raise RuntimeError("; ".join(failed))
    entries = [entry for _, entry in read_journal(executor.journal_path) if entry.time <= end]
    useful = sum(told.get("slot_seconds", 0.0) for told in progress)
    account = draw_up(run, entries, history, begin=begin, end=end, least=options.least, useful=useful)
    if options.plot is not None:
        from freetrain_parsl.report.timeline import draw_timeline

        title = f"Goodput {account.goodput:.3f}: main jobs grey, training jobs coloured"
        draw_timeline(run, history, options.plot, title=title)
    samples = sum(told.get("samples", 0) for told in progress)
    return {
        "goodput": account.goodput,
        "offered_node_seconds": account.offered,
        "useful_node_seconds": account.useful,
        "work_node_seconds": SAMPLE_NODE_SECONDS * samples,
        "work_share": SAMPLE_NODE_SECONDS * samples / account.offered,
        "windows": len(account.windows),
        "window_s_shortest": min(until - since for _, since, until in account.windows),
        "window_s_longest": max(until - since for _, since, until in account.windows),
        "start_s_median": median(account.starts),
        "blocks": run.blocks_requested,
        "rescales": sum(training.rescales for training in run.trainings.values()),
        "resumes_from_checkpoint": sum(training.resumes for training in run.trainings.values()),
        "fragments_lost": sum(fragment.failure for fragment in run.fragments),
        "samples": samples,
        "samples_lost": sum(told.get("samples_lost", 0) for told in progress),
        "duplicate_samples": sum(told.get("duplicate_samples", 0) for told in progress),
        "rows": account.rows(),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle-log", type=Path, metavar="FILE", help="the log (default: drawn)")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the replay (default 5)")
    parser.add_argument("--compression", type=float, default=20.0, help="seconds of the log per second (default 20)")
    parser.add_argument("--start", type=float, default=24.0, help="hour of the log at which to start (default 24)")
    parser.add_argument("--least", type=float, default=120.0, help="shortest window, replayed seconds (default 120)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the cluster (default 8)")
    parser.add_argument("--trainings", type=int, default=3, help="concurrent training jobs (default 3)")
    parser.add_argument("--most", type=int, default=4, help="maximum nodes per training job (default 4)")
    parser.add_argument("--policy", default="milp", help="allocation policy (default milp)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the node choice, and of a drawn log (default 1)")
    parser.add_argument("--directory", type=Path, help="keep the run's files there (default: a temporary directory)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the picture to this file (PNG)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    if options.idle_log is None:
        length = 3600.0 * options.start + 60.0 * options.minutes * options.compression + 3600.0
        table, name = synthetic_log(seconds=length, nodes=1024, seed=options.seed), "modelled on Summit's"
    else:
        table, name = open_log(options.idle_log).table, options.idle_log.name
    try:
        windows = choose_windows(
            table,
            nodes=options.nodes,
            start=3600.0 * options.start,
            compression=options.compression,
            seconds=60.0 * options.minutes,
            least=options.least,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="goodput-") as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        figures = measure(options, windows, directory)
    report("Where the offered node-time went", figures["rows"], ["freetrain-parsl", "parsl", "torch"])
    print(
        f"idle log {name}, from hour {options.start:g}, {options.compression:g} s in one: {figures['windows']} windows "
        f"of {figures['window_s_shortest']:.0f} to {figures['window_s_longest']:.0f} s on {options.nodes} nodes"
    )
    print(", ".join(f"{key} {value:g}" for key, value in figures.items() if isinstance(value, (int, float))))
    if options.json is not None:
        write_output(options.json, json.dumps(figures, indent=2) + "\n")
    kept = figures["goodput"] >= TARGET and figures["samples_lost"] == figures["duplicate_samples"] == 0
    print(f"goodput {figures['goodput']:.3f} (at least {TARGET}): {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
