"""Decision time: the count model in HiGHS, a dynamic program, the published model in CBC.

Use ``--quick`` for a short run, ``--json FILE`` to save the rows. Each instance is solved by all of them in sequence,
in one process on one thread; times include model construction, except CBC's. A published solve that reaches the cap
counts as the cap: its median and the ratio are then lower bounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report

from freetrain_parsl.planning.objectives.base import resolve_objective, value_table
from freetrain_parsl.planning.placement import current_counts
from freetrain_parsl.planning.policies import MilpPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.testing.instances import Instance

try:
    from _published import solve_published
except ImportError:  # python-mip is of the extra cbc; without it its columns are empty
    solve_published = None  # type: ignore[assignment] # the baseline is missing

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' exact models

from tests.support.exact import best_value
from tests.support.instances import measured_like_instance

HORIZON = 120.0
SIZES = [(10, 40), (10, 160), (30, 512), (30, 1024), (100, 4608)]
PUBLISHED_SIZES = {(10, 40), (10, 160)}
OBJECTIVE = resolve_objective("speedup")


@dataclass
class Measured:
    """Figures for one size."""

    milp: list[float] = field(default_factory=list)
    dp: list[float] = field(default_factory=list)
    proven: list[bool] = field(default_factory=list)
    error: float = 0.0
    best: list[float] = field(default_factory=list)
    published: dict[str, list[float]] = field(default_factory=dict)
    finished: dict[str, list[bool]] = field(default_factory=dict)
    loss: dict[str, list[float]] = field(default_factory=dict)


def dynamic_programme(case: Instance) -> float:
    """Tabulate the values and find the best sum without a solver."""
    held = current_counts(case.trainers, case.pool, case.current)
    tables = [value_table(OBJECTIVE, t, held[t.name], len(case.pool), HORIZON) for t in case.trainers]
    return best_value(np.stack(tables))


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the time in milliseconds."""
    started = time.perf_counter()
    result = function()
    return result, 1000 * (time.perf_counter() - started)


def measure(trainers: int, nodes: int, repeats: int, published_repeats: int, cap: float) -> Measured:
    """Solve `repeats` instances of one size."""
    policy = MilpPolicy("speedup", horizon=timedelta(seconds=HORIZON), time_limit=timedelta(seconds=30))
    measured = Measured()
    for seed in range(repeats):
        case = measured_like_instance(seed, trainers=trainers, nodes=nodes)
        decision, milp_ms = timed(lambda: policy.allocate(case.pool, case.trainers, case.current, case.now))  # noqa: B023 - called immediately
        best, dp_ms = timed(lambda: dynamic_programme(case))  # noqa: B023 - called immediately
        measured.milp.append(milp_ms)
        measured.dp.append(dp_ms)
        measured.proven.append(decision.proven_optimal)
        measured.error = max(measured.error, abs(decision.objective - best) / abs(best))
        if seed >= published_repeats:
            continue
        for label, big_m in (("", nodes + 1), ("_2n", 2 * nodes + 1)):
            answer = solve_published(case, OBJECTIVE, HORIZON, big_m, cap)
            measured.published.setdefault(label, []).append(1000 * answer.seconds)
            measured.finished.setdefault(label, []).append(answer.finished)
            if answer.objective is not None:
                measured.loss.setdefault(label, []).append(1 - answer.objective / best)
    return measured


def row(trainers: int, nodes: int, measured: Measured) -> dict[str, Any]:
    """Return one row of the table; `ratio` compares the medians of the same instances."""
    milp, published = measured.milp, measured.published.get("")
    same = milp[: len(published)] if published else []
    line: dict[str, Any] = {
        "trainers": trainers,
        "nodes": nodes,
        "instances": len(milp),
        "milp_ms_median": float(np.median(milp)),
        "milp_ms_p90": float(np.percentile(milp, 90)),
        "milp_ms_max": max(milp),
        "milp_proven": sum(measured.proven),
        "dp_ms_median": float(np.median(measured.dp)),
        "milp_dp_relative_error_max": measured.error,
        "published_ms_median": float(np.median(published)) if published else None,
        "ratio": float(np.median(published) / np.median(same)) if published else None,
    }
    for label in ("", "_2n"):
        times, loss = measured.published.get(label), measured.loss.get(label)
        if label:
            line[f"published{label}_ms_median"] = float(np.median(times)) if times else None
        line[f"published{label}_finished"] = f"{sum(measured.finished[label])}/{len(times)}" if times else None
        line[f"published{label}_loss_max"] = max(loss) if loss else None
    return line


def main() -> int:
    """Run and print; fail if the policy is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few instances, a short cap for CBC")
    parser.add_argument("--repeats", type=int, default=None, help="instances of each size (default 30; quick 5)")
    parser.add_argument("--published-repeats", type=int, default=None, help="instances of these for CBC (default 12)")
    parser.add_argument("--cap", type=float, default=None, help="seconds for each CBC solve (default 60; quick 10)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    repeats = options.repeats or (5 if options.quick else 30)
    # CBC's times spread over two orders of magnitude: a median of a few instances is meaningless.
    published = min(repeats, 12) if options.published_repeats is None else options.published_repeats
    cap = options.cap or (10.0 if options.quick else 60.0)
    if solve_published is None:
        print("python-mip is not installed (pip install 'mip>=1.15'): the published model is omitted")
        published = 0
    measure(10, 40, 2, 0, cap)  # warm-up: imports on first use
    rows = []
    for trainers, nodes in SIZES:
        with_published = min(repeats, published) if (trainers, nodes) in PUBLISHED_SIZES else 0
        rows.append(row(trainers, nodes, measure(trainers, nodes, repeats, with_published, cap)))
    report("Allocation decisions, milliseconds", rows, ["highspy", "numpy", "mip"], options.json)
    print(f"published: CBC capped at {cap:g} s a solve; where not all finished, time and ratio are lower bounds")
    exact = all(line["milp_dp_relative_error_max"] <= 1e-9 for line in rows)
    if not exact:
        print("the policy differs from the dynamic program", file=sys.stderr)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
