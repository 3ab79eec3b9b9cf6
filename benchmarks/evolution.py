"""The evolutionary search of the policy ``ones`` against exact counts, on random problems.

    python benchmarks/evolution.py [--instances 100] [--json FILE]

``separate``: nodes are machines of their own, so that the counts are all that matters, and the optimum is known.
``coupled``: nodes share hosts, in sizes that divide them. Values are relative to the bound of the exact model.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report

from freetrain_parsl.extensions.goodput.ones import OnesPolicy, PlacedValues
from freetrain_parsl.planning.objectives.base import Moment, resolve_objective
from freetrain_parsl.planning.placement import current_counts
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.testing.instances import Instance, shared_hosts_instance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.planning.policies import Policy

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' instances

from tests.support.instances import measured_like_instance

_OBJECTIVE = "speedup"
_GENERATIONS = 15  # of the search without a warm start
_PROBLEMS: Mapping[str, Callable[[int], Instance]] = {
    "separate, 12 trainers, 64 nodes": partial(measured_like_instance, trainers=12, nodes=64),
    "coupled, 6 trainers, 4 hosts of 4": partial(shared_hosts_instance),
    "coupled, 16 trainers, 16 hosts of 4": partial(shared_hosts_instance, hosts=16, trainers=16),
    "coupled, 12 trainers, 8 hosts of 8": partial(shared_hosts_instance, hosts=8, nodes_per_host=8, trainers=12),
}
_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "counts, then placement": lambda: MilpPolicy(_OBJECTIVE),
    "evolution alone": lambda: OnesPolicy(
        _OBJECTIVE, warm_start=False, generations=_GENERATIONS, patience=_GENERATIONS
    ),
    "ones": lambda: OnesPolicy(_OBJECTIVE),
}


def value_of(policy: Policy, case: Instance) -> tuple[float, float]:
    """Return the value of a policy's allocation with its placement, and the seconds that it took."""
    started = time.process_time()
    decision = policy.allocate(case.pool, case.trainers, case.current, case.now)
    seconds = time.process_time() - started
    ranked = sorted(case.trainers, key=lambda trainer: (trainer.submitted, trainer.name))
    moment = Moment(ranked, current_counts(ranked, case.pool, case.current), len(case.pool), case.now)
    values = PlacedValues(resolve_objective(_OBJECTIVE), moment, case.pool.horizon)
    return values.total(decision.allocation, case.pool, case.current), seconds


def rows(instances: int) -> list[dict[str, Any]]:
    """Solve all problems with all policies."""
    made = []
    for problem, make in _PROBLEMS.items():
        cases = [make(seed) for seed in range(instances)]
        bounds = [
            OnesPolicy(_OBJECTIVE, generations=1).allocate(c.pool, c.trainers, c.current, c.now).bound for c in cases
        ]
        exact = np.array([value_of(_POLICIES["counts, then placement"](), case)[0] for case in cases])
        for policy, create in _POLICIES.items():
            reached = [value_of(create(), case) for case in cases]
            values = np.array([value for value, _ in reached])
            shares = values / np.array(bounds)
            made.append(
                {
                    "problem": problem,
                    "policy": policy,
                    "share_of_bound_mean": float(shares.mean()),
                    "share_of_bound_p5": float(np.percentile(shares, 5)),
                    "better_than_counts": float((values > exact * (1 + 1e-9)).mean()),
                    "worse_than_counts": float((values < exact * (1 - 1e-9)).mean()),
                    "cpu_ms_median": 1000 * float(np.median([seconds for _, seconds in reached])),
                }
            )
    return made


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100, metavar="N", help="instances of each problem")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    report(
        "Evolution against exact counts, objective speedup", rows(options.instances), ["highspy", "numpy"], options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
