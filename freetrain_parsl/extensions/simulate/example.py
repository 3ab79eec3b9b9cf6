"""A small workload with invented applications, to try the simulation with."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_example"]

_APPLICATIONS = {
    # name: epochs, batches (initial, largest), samples a GPU (least, most), seconds (a sample, an exchange), noise
    "small": (10, (128, 2048), (16, 512), (0.0004, 0.02), 20.0),
    "medium": (20, (64, 1024), (8, 64), (0.004, 0.05), 10.0),
    "large": (30, (128, 4096), (16, 128), (0.008, 0.1), 40.0),
}
_STEPS = 100  # of the initial batch, in an epoch
_JOBS, _SECONDS_BETWEEN = 40, 90.0
_MOST_NODES = 4  # whose placements are listed


def write_example(directory: Path, gpus_per_node: int = 4) -> list[Path]:
    """Write ``jobs.csv`` and the three profiles, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    limits = ["application,epochs,init_batch,max_batch,min_local_batch,max_local_batch"]
    passes = ["application,nodes,gpus,placement,local_batch,step_time,sync_time"]
    worths = ["application,batch,epoch,progress,iterations,grad_sqr,grad_var"]
    for name, (epochs, (initial, largest), (least, most), (sample, exchange), noise) in _APPLICATIONS.items():
        limits.append(f"{name},{epochs},{initial},{largest},{least},{most}")
        for nodes in range(1, _MOST_NODES + 1):
            for placement in product(range(1, gpus_per_node + 1), repeat=nodes):
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
