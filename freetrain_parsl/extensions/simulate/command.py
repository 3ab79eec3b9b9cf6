"""``freetrain simulate``: compares policies by the completion times of many users' jobs on a shared cluster."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.options import (
    check_targets,
    choice,
    on_progress_of,
    progress_bars,
    split_names,
    write_json,
    write_outputs,
)
from freetrain_parsl.errors import InvalidInput, UsageError
from freetrain_parsl.extensions.replay.trainers import trainer_set
from freetrain_parsl.extensions.simulate.comparison import JobKnowledge, compare_policies, competitors
from freetrain_parsl.extensions.simulate.description import ClusterShape
from freetrain_parsl.extensions.simulate.jobs.curve_jobs import read_job_log, read_trainer_workload
from freetrain_parsl.extensions.simulate.jobs.profiles import read_profiles
from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest, read_workload
from freetrain_parsl.extensions.simulate.page import heading, result_table, write_page
from freetrain_parsl.extensions.simulate.simulation import DEFAULT_INTERVAL
from freetrain_parsl.report.output import write_output
from freetrain_parsl.screen import say

__all__ = ["simulate", "write_example"]

_APPLICATIONS = {
    # name: epochs, batches (initial, largest), samples a GPU (least, most), seconds (a sample, an exchange), noise
    "small": (10, (128, 2048), (16, 512), (0.0004, 0.02), 20.0),
    "medium": (20, (64, 1024), (8, 64), (0.004, 0.05), 10.0),
    "large": (30, (128, 4096), (16, 128), (0.008, 0.1), 40.0),
}
_STEPS = 100  # of the initial batch, in an epoch
_JOBS, _SECONDS_BETWEEN = 40, 90.0
_GPUS_PER_NODE = 4
_MOST_NODES = 4  # whose placements are listed


def write_example(directory: Path) -> list[Path]:
    """Write ``jobs.csv`` and the three profiles, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    limits = ["application,epochs,init_batch,max_batch,min_local_batch,max_local_batch"]
    passes = ["application,nodes,gpus,placement,local_batch,step_time,sync_time"]
    worths = ["application,batch,epoch,progress,iterations,grad_sqr,grad_var"]
    for name, (epochs, (initial, largest), (least, most), (sample, exchange), noise) in _APPLICATIONS.items():
        limits.append(f"{name},{epochs},{initial},{largest},{least},{most}")
        for nodes in range(1, _MOST_NODES + 1):
            for placement in product(range(1, _GPUS_PER_NODE + 1), repeat=nodes):
                gpus, digits = sum(placement), "".join(map(str, placement))
                sync = exchange * (nodes if nodes > 1 else 0.2) * (gpus > 1)
                passes += [
                    f"{name},{nodes},{gpus},{digits},{local},{0.005 + local * sample + sync:.6f},{sync:.6f}"
                    for local in (least, most)
                ]
        for doubling in range((largest // initial).bit_length()):
            batch = initial << doubling
            worth = (noise + 1) / (noise * initial / batch + 1)
            worths += [
                f"{name},{batch},{epoch},{_STEPS * epoch},{_STEPS * epoch / worth:.1f},1,{noise:g}"
                for epoch in range(1, epochs + 1)
            ]
    draw = random.Random(1)
    jobs = ["name,time,application,num_replicas,batch_size"]
    for number in range(_JOBS):
        name = draw.choices(list(_APPLICATIONS), weights=(6, 3, 1))[0]
        initial = _APPLICATIONS[name][1][0]
        gpus = draw.choice((1, 2, 4, 8))
        jobs.append(f"{name}-{number},{number * _SECONDS_BETWEEN:g},{name},{gpus},{initial * min(gpus, 8)}")
    files = {"jobs": jobs, "applications": limits, "throughput": passes, "efficiency": worths}
    written = [directory / f"{file}.csv" for file in files]
    for path, lines in zip(written, files.values(), strict=True):
        write_output(path, "\n".join([*lines, ""]))
    return written


def simulate(
    workload: Annotated[
        Path | None, typer.Argument(metavar="WORKLOAD", help="Jobs with profiles or curves, or a job log.")
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of applications.csv, throughput.csv and efficiency.csv."),
    ] = None,
    trainers: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Curves for the jobs of a log: hpo:N, mixed:N, or a .yaml or .csv list."),
    ] = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Skip malformed lines of a job log.")] = False,
    cluster: Annotated[str, typer.Option(metavar="NODESxGPUS", help="Nodes, and GPUs on each.")] = "16x4",
    policy: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="Policies.")] = "milp,tiresias",
    knowledge: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Knowledge of milp and ones: none, age, curves or work.")
    ] = "work",
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two decisions.")] = DEFAULT_INTERVAL,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each job's completion time.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML report to this file.")] = None,
    example: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write example inputs into this directory.")
    ] = None,
) -> None:
    """Simulate a shared cluster, and compare policies by the completion times of its jobs."""
    if example is not None:
        for file in write_example(example):
            say(str(file))
        return
    if workload is None:
        raise UsageError(
            "simulate: WORKLOAD is missing; 'freetrain simulate --example DIR' writes inputs to try it with"
        )
    if profiles is not None and trainers is not None:
        raise UsageError("simulate: --profiles is for workloads, and --trainers for job logs; give one of them")
    try:
        shape = ClusterShape.parse(cluster)
        known = [choice("--knowledge", name, JobKnowledge) for name in split_names("--knowledge", knowledge)]
        chosen = competitors(split_names("--policy", policy), known)
        if profiles is None and JobKnowledge.CURVES in known:
            raise UsageError("simulate: --knowledge curves is for workloads with --profiles, which are then measured")
        check_targets([workload], {"--json": json, "--csv": csv, "--report": report})
        requests = _read_jobs(workload, profiles, trainers, shape.gpus, lenient=lenient)
        with progress_bars() as progress:
            result = compare_policies(
                workload.name, requests, shape, chosen, on_progress_of(progress), interval=interval
            )
    except KeyboardInterrupt:
        say("freetrain: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    result["command"] = shlex.join(["freetrain", *sys.argv[1:]])
    _show(result)
    write_outputs(result, (json, write_json), (csv, _write_csv), (report, write_page))


def _read_jobs(
    workload: Path, profiles: Path | None, trainers: str | None, gpus: int, *, lenient: bool
) -> tuple[JobRequest, ...]:
    """Read the jobs in the format that follows from what is given with them."""
    if profiles is not None:
        return read_workload(workload, read_profiles(profiles), gpus)
    if trainers is not None:
        return read_job_log(workload, trainer_set(trainers).trainers, gpus, lenient=lenient)
    try:
        return read_trainer_workload(workload, gpus)
    except InvalidInput as error:
        raise InvalidInput(
            f"{error} (read as a list of trainers; a workload of applications needs --profiles, a job log --trainers)"
        ) from None


def _show(result: Mapping[str, Any]) -> None:
    console = Screen(highlight=False)
    console.print(heading(result))
    console.print()
    console.print(result_table(result))
    for entry in result["policies"]:
        if entry["refused"]:
            say(
                f"freetrain: warning: policy {entry['policy']!r}: {entry['refused']:,} decisions were refused, and the "
                "last good allocation was kept",
                err=True,
            )


def _write_csv(result: Mapping[str, Any], file: Path) -> None:
    lines = ["policy,knowledge,job,jct"]
    lines += [
        f"{entry['policy']},{entry['knowledge']},{job['job']},{job['jct']:g}"
        for entry in result["policies"]
        for job in entry["jobs"]
    ]
    write_output(file, "\n".join([*lines, ""]))
