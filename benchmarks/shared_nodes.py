"""Jobs that share nodes: times of decisions over a stream of changes, and what sharing gains on an embedded cluster.

    python benchmarks/shared_nodes.py [--decisions 60] [--live 40] [--seed 4] [--steps device] [--json FILE]

Decisions: jobs of different sizes, half of them for one accelerator at most, share nodes. Between two decisions, two
nodes close, two others open, and a job ends that another one follows. Times are those of the whole decision: tables of
values, counts, placement. A *move* is a job that keeps its number of accelerators, all of which are still there, on
others.

Live: see `_shared_live`, which says what stands in for accelerators. `ratio` is `shared_samples` / `whole_node_samples`
in the same holes and time; ``of_small``: of the jobs for one accelerator. `neighbour_slowdown` is the median step time
of such a job with three neighbours on its node, relative to that alone. The default seed is one whose four nodes are
all idle for most of the time, so that the large job gets one where nodes are shared. All takes less than 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report
from _shared_live import measure as measure_live

from freetrain_parsl.places import slot_place
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.placement import check_allocation
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.planning.model import Allocation

_SIZES = ((10, 40, 4), (40, 160, 4), (100, 1024, 8))  # jobs, nodes, accelerators of a node
_WARM = 3  # decisions that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--decisions", type=int, default=60, help="for each size; 0: none (default: %(default)s)")
    parser.add_argument("--live", type=float, default=40.0, help="seconds of training; 0: none (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=4, help="of the drawn log (default: %(default)s)")
    parser.add_argument(
        "--steps", choices=("device", "cpu"), default="device", help="wait for accelerators, or compute (default: wait)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args()
    rows = [measure(*size, decisions=options.decisions) for size in _SIZES if options.decisions]
    if rows:
        report("Decisions where jobs share nodes", rows, ["highspy", "numpy"])
    if options.live:
        with tempfile.TemporaryDirectory(prefix="shared-nodes-") as scratch:
            row = measure_live(Path(scratch), seconds=options.live, seed=options.seed, steps=options.steps)
        report("Training on nodes that jobs share", [row], ["freetrain-parsl", "parsl", "torch"])
        rows.append(row)
    if options.json is not None:
        write_output(options.json, json.dumps(rows, indent=2) + "\n")


def measure(jobs: int, nodes: int, accelerators: int, *, decisions: int) -> dict[str, Any]:
    """Return a row of the table."""
    policy = MilpPolicy(time_limit=timedelta(seconds=5))
    current: Allocation = {}
    seconds, proven, gaps, moves = [], 0, [0.0], 0
    for number, (pool, trainers) in enumerate(_stream(jobs, nodes, accelerators, decisions + _WARM)):
        decision = policy.allocate(pool, trainers, current, float(number))
        check_allocation(decision.allocation, pool, trainers)
        if number >= _WARM:
            seconds.append(decision.solve_seconds)
            proven += decision.proven_optimal
            gaps.append((decision.bound - decision.objective) / abs(decision.bound))
            moves += sum(
                len(decision.allocation.get(name, ())) == len(slots) and decision.allocation[name] != slots
                for name, slots in current.items()
                if slots <= pool.keys()
            )
        current = decision.allocation
    return {
        "jobs": jobs,
        "nodes": nodes,
        "accelerators": accelerators,
        "solve_ms_median": round(1e3 * float(np.median(seconds)), 2),
        "solve_ms_p99": round(1e3 * float(np.quantile(seconds, 0.99)), 2),
        "proven_optimal": proven / decisions,
        "largest_gap": max(gaps),
        "moves": moves,
    }


def _stream(jobs: int, nodes: int, accelerators: int, decisions: int) -> Iterator[tuple[Pool, list[PlannedJob]]]:
    """Yield the pool and the jobs of each decision; most nodes are idle, and some are there in part."""
    rng = np.random.default_rng(0)
    every = [f"n{number:04d}" for number in range(nodes)]
    here = set(rng.choice(every, size=int(0.9 * nodes), replace=False).tolist())
    trainers = [_job(rng, number, accelerators, nodes) for number in range(jobs)]
    for number in range(decisions):
        slots = [
            PoolNode(slot_place(node, lane), host=node)
            for node in sorted(here)
            for lane in range(accelerators)
            if lane or int(node[1:]) % 25  # a node in 25 lacks a slot
        ]
        yield Pool(slots, horizon=120.0, slots_per_host=accelerators), trainers
        closing = rng.choice(sorted(here), size=2, replace=False).tolist()
        opening = rng.choice(sorted(set(every) - here), size=2, replace=False).tolist()
        here = (here - set(closing)) | set(opening)
        ended = int(rng.integers(jobs))
        trainers[ended] = _job(rng, jobs + number, accelerators, nodes)


def _job(rng: np.random.Generator, number: int, accelerators: int, nodes: int) -> PlannedJob:
    small = rng.random() < 0.5
    most = 1 if small else int(min(nodes, 2 ** rng.integers(0, 8))) * accelerators
    rate, power = float(rng.uniform(50, 500)), float(rng.uniform(0.75, 0.98))
    points = {1: rate} if small else {count: rate * count**power for count in (1, accelerators, 8 * accelerators, most)}
    costs = CostsInSeconds(*rng.uniform(1.0, 10.0, 3).tolist())
    job = PlannedJob(f"job{number}", 1, most, ScalingCurve(points), costs, submitted=float(number))
    return replace(job, priority=float(rng.uniform(0.5, 2.0)))


if __name__ == "__main__":
    main()
