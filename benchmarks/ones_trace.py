"""Completion times of the jobs of ONES' own trace (SC 2021, public artifact), next to those published with it.

    python benchmarks/ones_trace.py DIR [--jobs 50] [--json FILE]

DIR has ``trace_1.csv``, ``job_history.csv`` and ``*_profile.csv`` of the artifact. It contains no throughput by number
of GPUs. These jobs are therefore made of what it does contain:

- The history has throughput at the largest batch, which a job has on the GPUs that its trace requests. Each halving of
  the GPUs divides it by 1.71, as measured there for ResNet-18 at 512 and 1024 samples, and each doubling multiplies it,
  up to 4 times the requested GPUs, the most that ONES allows.
- Samples until a job stops are those of the history: its epochs times the size of an epoch in the trace.
- A change of GPUs costs 5 s, and decisions are 15 s apart.

The published profiles do not say which jobs of the trace they are about. The order of the policies can be compared, not
single jobs.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from _report import report

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.simulate.comparison import JobKnowledge, compare_policies, competitors
from freetrain_parsl.extensions.simulate.description import ClusterShape
from freetrain_parsl.extensions.simulate.jobs.curve_jobs import curve_request
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob

if TYPE_CHECKING:
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest

_CLUSTER = ClusterShape(16, 4)
_DOUBLING = 1.71
_MOST = 4  # times the requested GPUs
_COST, _INTERVAL = 5.0, 15.0
_DEVELOPMENT = (
    *(("bert", "cola"), ("bert", "mrpc"), ("bert", "sst2"), ("resnet18", "cifar"), ("vgg16", "cifar")),
    *(("googlenet", "cifar"), ("alexnet", "imagenet"), ("resnet50", "imagenet"), ("vgg16", "imagenet")),
    ("inception_v3", "imagenet"),
)
"""Model and task of the jobs of the history, in order of id, twice: those of ``trace_dev.csv``."""
_PUBLISHED = {"ones-published": "ONES", "optimus": "OPTIMUS", "tiresias": "TIRESIAS"}


def rows_of(file: Path) -> list[dict[str, str]]:
    """Read a CSV file."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None


def history(file: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (samples per second at the largest batch, epochs until it stops) of each model and task."""
    rates: dict[tuple[str, str], list[float]] = {}
    epochs: dict[tuple[str, str], list[int]] = {}
    by_job: dict[int, list[dict[str, str]]] = {}
    for row in rows_of(file):
        by_job.setdefault(int(row["id"]), []).append(row)
    for number, rows in by_job.items():
        # Job 0 of two runs has the same id: the first job of the development trace is the one with the last rows.
        own = [row for row in rows if row["total_workload"] == rows[-1]["total_workload"]]
        largest = max(int(row["batch_size"]) for row in own)
        kind = _DEVELOPMENT[number % len(_DEVELOPMENT)]
        rates.setdefault(kind, []).append(
            median(float(row["throughput"]) for row in own if int(row["batch_size"]) == largest)
        )
        epochs.setdefault(kind, []).append(len(own))
    return {kind: (fmean(rates[kind]), fmean(epochs[kind])) for kind in rates}


def jobs(directory: Path, number: int) -> list[JobRequest]:
    """Make the first jobs of the trace."""
    known = history(directory / "job_history.csv")
    made = []
    for index, row in enumerate(rows_of(directory / "trace_1.csv")[:number]):
        rate, epochs = known[row["model"], row["task"]]
        gpus = int(row["num_gpus"])
        counts = [1 << power for power in range((_MOST * gpus).bit_length())]
        curve = ScalingCurve((count, rate * _DOUBLING ** math.log2(count / gpus)) for count in counts)
        trainer = PlannedJob(
            row["model"], 1, min(_MOST * gpus, _CLUSTER.gpus), curve, CostsInSeconds(_COST, _COST, _COST)
        )
        work = epochs * float(row["epoch_size"])
        made.append(curve_request(trainer, f"{index:03d}-{row['model']}", float(row["time"]), gpus, work))
    return made


def published(directory: Path, name: str) -> float:
    """Return the mean published completion time, seconds."""
    return fmean(float(row["completion_time"]) for row in rows_of(directory / f"{name}_profile.csv"))


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=50, metavar="N")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    names = ["milp", "ones", "ones-published", "optimus", "tiresias", "equal-share", "fcfs"]
    chosen = competitors(names, [JobKnowledge.WORK])
    result = compare_policies("ONES", jobs(options.directory, options.jobs), _CLUSTER, chosen, interval=_INTERVAL)
    rows: list[dict[str, Any]] = [
        {
            "policy": entry["policy"],
            "knowledge": entry["knowledge"],
            "mean_jct": entry["mean_jct"],
            "median_jct": entry["median_jct"],
            "restarts": entry["restarts"],
            "published_mean_jct": published(options.directory, _PUBLISHED[entry["policy"]])
            if entry["policy"] in _PUBLISHED
            else None,
        }
        for entry in sorted(result["policies"], key=lambda entry: entry["mean_jct"])
    ]
    report(f"Completion times of {options.jobs} jobs of ONES' trace, seconds", rows, ["highspy", "numpy"], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
