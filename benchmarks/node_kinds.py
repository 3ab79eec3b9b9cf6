"""Two kinds of nodes: what the choice of the kinds before the policy loses, and how long it takes.

Loss: random instances small enough to try every assignment of the trainers to the kinds with the policy itself. The
row has the share of the best of these values that is reached, and the share of instances in which it is reached.
``milp`` decides by counts, so that its row has to be 1. ``window`` also knows when nodes close.

Time: processor time of one decision of ``milp`` over trainers with curves on both kinds, two thirds of them running.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.node_kinds import allocate_over_kinds
from freetrain_parsl.planning.policies import MilpPolicy, WindowPolicy
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from freetrain_parsl.planning.policies import Policy

KINDS = ("fast", "slow")
HORIZON = 300.0


def instance(
    rng: np.random.Generator, trainers: int, nodes: int, closing: float
) -> tuple[Pool, list[PlannedJob], dict[str, frozenset[str]]]:
    """Make trainers that are 1 to 10 times as fast on fast nodes; a share `closing` of the nodes closes at a time."""
    made = [
        PoolNode(
            f"{kind}{index:03}",
            float(rng.uniform(10, 2 * HORIZON)) if rng.random() < closing else None,
            node_kind=kind,
        )
        for kind in KINDS
        for index in range(nodes)
    ]
    jobs, current = [], {}
    free = {kind: [node.name for node in made if node.node_kind == kind] for kind in KINDS}
    for index in range(trainers):
        slow = ScalingCurve({n: 10.0 * float(rng.uniform(0.7, 0.98)) ** np.log2(n) * n for n in (1, 2, 4, 8, 16, 64)})
        curves = {"slow": slow, "fast": slow.scaled(float(rng.uniform(1, 10)))}
        costs = CostsInSeconds(*map(float, rng.uniform([5, 5, 10], [20, 15, 60])))
        most = int(rng.integers(1, max(2, nodes // 2 + 1)))
        jobs.append(PlannedJob(f"t{index:02}", 1, most, slow, costs, submitted=float(index), curves=curves))
        kind = KINDS[int(rng.integers(0, 2))]
        count = int(rng.integers(1, most + 1))
        if rng.random() < 2 / 3 and len(free[kind]) >= count:
            current[jobs[-1].name] = frozenset(free[kind][:count])
            del free[kind][:count]
    return Pool(made, horizon=HORIZON), jobs, current


def loss(make: type[Policy], seeds: int, trainers: int, nodes: int) -> dict[str, Any]:
    """Compare the decision with the best over all assignments of trainers to kinds."""
    shares = []
    for seed in range(seeds):
        pool, jobs, current = instance(np.random.default_rng(seed), trainers, nodes, closing=0.6)
        found = allocate_over_kinds(make(), pool, jobs, current, 0.0).objective
        best = max(
            allocate_over_kinds(
                make(),
                pool,
                [replace(job, node_kinds=(kind,)) for job, kind in zip(jobs, kinds, strict=True)],
                current,
                0.0,
            ).objective
            for kinds in itertools.product(KINDS, repeat=trainers)
        )
        shares.append(found / best)
    return {
        "policy": make.name,
        "trainers": trainers,
        "nodes": f"{nodes}+{nodes}",
        "mean": fmean(shares),
        "least": min(shares),
        "optimal": fmean(share > 1 - 1e-6 for share in shares),
    }


def seconds(trainers: int, nodes: int, seeds: int) -> dict[str, Any]:
    """Measure decisions over two kinds, and of the same policy where all nodes are of one kind."""
    times: dict[str, list[float]] = {"kinds": [], "one": []}
    proven = []
    for seed in range(seeds):
        pool, jobs, current = instance(np.random.default_rng(seed), trainers, nodes, closing=0.0)
        one = Pool((replace(node, node_kind="") for node in pool.values()), horizon=HORIZON)
        for word, nodes_there, those in (("kinds", pool, jobs), ("one", one, [replace(j, curves={}) for j in jobs])):
            begin = time.process_time()
            decision = allocate_over_kinds(
                MilpPolicy(time_limit=timedelta(seconds=5)), nodes_there, those, current, 0.0
            )
            times[word].append(time.process_time() - begin)
            if word == "kinds":
                proven.append(decision.proven_optimal)
    return {
        "trainers": trainers,
        "nodes": f"{nodes}+{nodes}",
        "median_ms": 1e3 * median(times["kinds"]),
        "largest_ms": 1e3 * max(times["kinds"]),
        "one_kind_ms": 1e3 * median(times["one"]),
        "proven": fmean(proven),
    }


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    losses = [loss(make, options.seeds, 4, 4) for make in (MilpPolicy, WindowPolicy)]
    times = [seconds(trainers, nodes, 10) for trainers, nodes in ((8, 16), (20, 32), (40, 64), (80, 128))]
    report("Two kinds of nodes: share of the best value over all choices of kinds", losses, ["highspy", "numpy"])
    report("Two kinds of nodes: time of a decision of milp", times, ["highspy", "numpy"])
    if options.json is not None:
        write_output(options.json, json.dumps({"loss": losses, "time": times}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
