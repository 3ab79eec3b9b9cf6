"""Completion times of all policies on one workload, next to the published ones of Pollux.

    python benchmarks/jct.py WORKLOAD.csv --profiles DIR [--published published-jct.csv] [--json FILE]

The published times are a CSV file with the columns workload, policy, job and jct; by default the one in DIR, if any.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from _report import report

from freetrain_parsl.simulate.cluster import ClusterShape
from freetrain_parsl.simulate.comparison import compare_policies
from freetrain_parsl.simulate.competitors import COMPETITORS, JobKnowledge, competitors
from freetrain_parsl.simulate.profiles import read_profiles
from freetrain_parsl.simulate.workload import read_workload


def published_mean(file: Path, workload: str) -> float | None:
    """Return the published mean completion time of Pollux; ``None`` if there is none."""
    if not file.exists():
        return None
    with file.open(encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream)
        times = [float(row["jct"]) for row in rows if (row["workload"], row["policy"]) == (workload, "pollux")]
    return fmean(times) if times else None


def row(entry: dict[str, Any], pollux: float | None) -> dict[str, Any]:
    """Return one row of the table."""
    return {
        "policy": entry["policy"],
        "knowledge": entry["knowledge"],
        "mean_jct": entry["mean_jct"],
        "median_jct": entry["median_jct"],
        "p99_jct": entry["p99_jct"],
        "ratio_to_published_pollux": None if pollux is None else entry["mean_jct"] / pollux,
        "restarts": entry["restarts"],
        "solve_ms_median": entry["solve_ms_median"],
        "wall_seconds": entry["wall_seconds"],
    }


def main() -> int:
    """Run all policies and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--profiles", type=Path, required=True, metavar="DIR")
    parser.add_argument("--published", type=Path, default=None, metavar="FILE")
    parser.add_argument("--cluster", type=ClusterShape.parse, default=ClusterShape(16, 4), metavar="NODESxGPUS")
    parser.add_argument("--policy", default=",".join(COMPETITORS), metavar="NAME[,NAME]")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    requests = read_workload(options.workload, read_profiles(options.profiles), options.cluster.gpus)
    chosen = competitors(options.policy.split(","), list(JobKnowledge))
    result = compare_policies(options.workload.stem, requests, options.cluster, chosen)
    pollux = published_mean(options.published or options.profiles / "published-jct.csv", options.workload.stem)
    rows = [row(entry, pollux) for entry in result["policies"]]
    report(f"Completion times, {options.workload.stem}, seconds", rows, ["highspy", "numpy"], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
