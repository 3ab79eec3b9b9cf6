"""Several resources: workers and servers decided together, in SMD's two stages, and by its baselines.

``--instances DIR`` takes the instances of a directory; if it has an ``expected.csv`` with columns ``jobs``, ``seed``
and ``exact``, the joint utilities are compared with it. ``--generate`` makes random instances, one for each number of
jobs, load and seed. The load is the sum of the jobs' limits as a multiple of the capacity. In the printed table the
baselines are shares of the joint utility; the JSON file has their utilities.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from datetime import timedelta
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from _report import report

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.resources.instances import (
    ResourceInstance,
    parse_instance,
    read_instance,
)
from freetrain_parsl.extensions.resources.policies import (
    EqualServersPolicy,
    MarginalGainPolicy,
    SmdPolicy,
    SmdTwoStagePolicy,
)
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' random instances

from tests.support.resource_instances import generate_instance

BASELINES = {"two_stage": SmdTwoStagePolicy, "esw": EqualServersPolicy, "optimus": MarginalGainPolicy}
TOLERATED = 1e-3  # difference from the expected utility, relative


def measure(instance: ResourceInstance, time_limit: timedelta) -> dict[str, Any]:
    """Decide an instance by all policies; `seconds` and `gap` are those of the joint decision."""
    problem = instance.problem
    joint = SmdPolicy(time_limit=time_limit).allocate(problem)  # the first, so that its time includes the enumeration
    return {
        "jobs": len(problem.jobs),
        "seed": instance.seed,
        "load": round(problem.load, 3),
        "joint": joint.utility,
        **{name: policy().allocate(problem).utility for name, policy in BASELINES.items()},
        "seconds": joint.solve_seconds,
        "gap": joint.gap,
    }


def relative(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the printed table: the baselines as shares of the joint utility."""
    return {**row, **{name: row[name] / row["joint"] for name in BASELINES}}


def instances(options: argparse.Namespace) -> Iterator[ResourceInstance]:
    """Yield the instances to measure."""
    if options.instances is not None:
        for file in sorted(options.instances.glob("*.json")):
            yield read_instance(file)
    for jobs, load, seed in itertools.product(options.generate, options.load, options.seed):
        yield parse_instance(generate_instance(jobs, load=load, seed=seed), f"{jobs} jobs, load {load:g}, seed {seed}")


def expected_utilities(directory: Path | None) -> dict[tuple[int, int], float]:
    """Read the joint optimum of each instance of a directory, by its jobs and seed."""
    file = None if directory is None else directory / "expected.csv"
    if file is None or not file.exists():
        return {}
    with file.open(encoding="utf-8", newline="") as opened:
        return {(int(row["jobs"]), int(row["seed"])): float(row["exact"]) for row in csv.DictReader(opened)}


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, metavar="DIR")
    parser.add_argument("--generate", type=int, nargs="+", default=[], metavar="JOBS")
    parser.add_argument("--load", type=float, nargs="+", default=[3.0])
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        rows = [measure(instance, timedelta(seconds=options.time_limit)) for instance in instances(options)]
    except UsageError as error:
        parser.error(str(error))
    if not rows:
        parser.error("no instances: give --instances DIR with JSON files, or --generate JOBS")
    report("Several resources: utility, baselines relative to joint", list(map(relative, rows)), ["highspy", "numpy"])
    for load in sorted({round(row["load"], 1) for row in rows}):
        ratio = geometric_mean(row["joint"] / row["two_stage"] for row in rows if round(row["load"], 1) == load)
        print(f"load {load:g}: joint is {ratio:.2f} × two-stage (geometric mean)")  # noqa: RUF001 - a product
    if options.json is not None:
        write_output(options.json, json.dumps({"instances": rows}, indent=2) + "\n")
    known = expected_utilities(options.instances)
    wrong = [
        f"{row['jobs']} jobs, seed {row['seed']}: {row['joint']:g} instead of {exact:g}"
        for row in rows
        if (exact := known.get((row["jobs"], row["seed"]))) and abs(row["joint"] - exact) > TOLERATED * exact
    ]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
