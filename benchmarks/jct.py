"""Completion times of all policies, next to the published ones of Pollux.

    python benchmarks/jct.py WORKLOAD.csv ... --profiles DIR [--published published-jct.csv] [--json FILE]

The published times are a CSV file with the columns workload, policy, job and jct; by default the one in DIR, if any.
With several workloads, a second table has the geometric mean of the ratios of mean times, and the largest ratios of
medians and 99th percentiles.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report

from freetrain_parsl.extensions.simulate.comparison import COMPETITORS, JobKnowledge, compare_policies, competitors
from freetrain_parsl.extensions.simulate.description import ClusterShape
from freetrain_parsl.extensions.simulate.jobs.profiles import read_profiles
from freetrain_parsl.extensions.simulate.jobs.workload import read_workload

if TYPE_CHECKING:
    from collections.abc import Sequence


def published_times(file: Path, workload: str) -> list[float]:
    """Return the published completion times of Pollux; nothing if there are none."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream)
        return [float(row["jct"]) for row in rows if (row["workload"], row["policy"]) == (workload, "pollux")]


def row(workload: str, entry: dict[str, Any], pollux: Sequence[float]) -> dict[str, Any]:
    """Return one row of the table."""
    mean, median, p99 = (fmean(pollux), np.median(pollux), np.percentile(pollux, 99)) if pollux else (None,) * 3
    return {
        "workload": workload,
        "policy": entry["policy"],
        "knowledge": entry["knowledge"],
        "mean_jct": entry["mean_jct"],
        "median_jct": entry["median_jct"],
        "p99_jct": entry["p99_jct"],
        "ratio_to_published_pollux": ratio(entry["mean_jct"], mean),
        "median_ratio": ratio(entry["median_jct"], median),
        "p99_ratio": ratio(entry["p99_jct"], p99),
        "restarts": entry["restarts"],
        "solve_ms_median": entry["solve_ms_median"],
        "wall_seconds": entry["wall_seconds"],
    }


def ratio(value: float, published: float | None) -> float | None:
    """Return the ratio to a published value, if there is one."""
    return None if published is None else float(value / published)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each policy and knowledge, over the workloads with published times."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in rows:
        if one["ratio_to_published_pollux"] is not None:
            groups.setdefault((one["policy"], one["knowledge"]), []).append(one)
    return [
        {
            "policy": policy,
            "knowledge": knowledge,
            "workloads": len(group),
            "mean_ratio": geometric_mean([one["ratio_to_published_pollux"] for one in group]),
            "largest_median_ratio": max(one["median_ratio"] for one in group),
            "largest_p99_ratio": max(one["p99_ratio"] for one in group),
        }
        for (policy, knowledge), group in groups.items()
    ]


def main() -> int:
    """Run all policies and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path, nargs="+", metavar="WORKLOAD")
    parser.add_argument("--profiles", type=Path, required=True, metavar="DIR")
    parser.add_argument("--published", type=Path, default=None, metavar="FILE")
    parser.add_argument("--cluster", type=ClusterShape.parse, default=ClusterShape(16, 4), metavar="NODESxGPUS")
    parser.add_argument("--policy", default=",".join(COMPETITORS), metavar="NAME[,NAME]")
    parser.add_argument("--knowledge", default="none,age,curves,work", metavar="NAME[,NAME]")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    told = [JobKnowledge(name) for name in options.knowledge.split(",")]
    chosen = competitors(options.policy.split(","), told)
    applications = read_profiles(options.profiles)
    file = options.published or options.profiles / "published-jct.csv"
    rows = []
    for number, workload in enumerate(options.workloads, start=1):
        print(f"{workload.stem} ({number} of {len(options.workloads)})", file=sys.stderr, flush=True)
        requests = read_workload(workload, applications, options.cluster.gpus)
        result = compare_policies(workload.stem, requests, options.cluster, chosen)
        pollux = published_times(file, workload.stem)
        rows += [row(workload.stem, entry, pollux) for entry in result["policies"]]
    names = ", ".join(workload.stem for workload in options.workloads)
    packages = ["highspy", "numpy"]
    report(f"Completion times, {names}, seconds", rows, packages, options.json)
    if len(options.workloads) > 1 and (overall := summary(rows)):
        report("Relative to published Pollux", overall, packages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
