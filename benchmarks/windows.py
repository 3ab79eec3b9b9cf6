"""Time of a window-aware decision, and its gap to the bound.

Use ``--quick`` for a short run, ``--json FILE`` to save the rows. Trainers scale to 64 nodes: odd instances have
equal trainers with the curve that BFTrainer (arXiv 2106.12091) measured for ShuffleNet on Summit, rounded; even ones
have trainers whose rate grows by a factor 1.55-1.98 per doubling. Growing costs 18 s, shrinking 12 s. Windows close
after 10 s to 4 hours, evenly on a logarithmic scale; the horizon is 120, 600 or 3600 s; seven in ten trainers are
running. The gap is (bound - objective) / bound, with the bound proven by the solver itself. ``count model`` is the
relative loss in value of the count model's counts on the latest-closing nodes: the cost of ignoring the closings.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _report import report

from freetrain_parsl.planning.solvers.column_generation import maximise_windows
from freetrain_parsl.planning.solvers.window_model import Counts, WindowInstance, evaluate

SHUFFLENET = {0: 0.0, 1: 1.0, 2: 1.93, 4: 3.6, 8: 6.9, 16: 12.9, 32: 23.0, 64: 38.0}
HORIZONS = (120.0, 600.0, 3600.0)


@dataclass(frozen=True)
class Size:
    """One row of the table, and its limits."""

    trainers: int
    nodes: int
    classes: int
    seconds: float
    gap: float
    offered: float = 0.0  # share of the classes
    startup: float = 0.0


SIZES = [
    Size(10, 85, 12, 0.1, 0.005),
    Size(10, 85, 20, 0.2, 0.005),
    Size(10, 128, 6, 0.1, 0.015),
    Size(30, 1024, 10, 1.0, 0.005),
    Size(100, 4608, 20, 5.0, 0.005),
    Size(10, 128, 6, 0.1, 0.015, offered=0.5, startup=20.0),
    Size(30, 1024, 10, 1.0, 0.005, offered=0.4, startup=20.0),
]


def instance(seed: int, size: Size) -> WindowInstance:
    """Make a problem, reproducible from the seed."""
    rng = np.random.default_rng(seed)
    trainers, nodes, classes = size.trainers, size.nodes, size.classes
    counts = np.arange(min(64, nodes) + 1)
    if seed % 2:
        rates = np.tile(np.interp(counts, list(SHUFFLENET), list(SHUFFLENET.values())), (trainers, 1))
    else:
        doublings = np.cumprod(rng.uniform(1.55, 1.98, (trainers, 6)), axis=1)
        rates = np.stack([np.interp(counts, list(SHUFFLENET), [0.0, 1.0, *row]) for row in doublings])
    sizes = 1 + rng.multinomial(nodes - classes, rng.dirichlet(np.ones(classes)))
    offered = rng.random(classes) < size.offered
    return WindowInstance(
        rates=rates,
        up=np.full(trainers, 18.0),
        down=np.full(trainers, 12.0),
        start=np.zeros(trainers),
        checkpoint=np.zeros(trainers),
        current=_held(rng, np.where(offered, 0, sizes), trainers, len(counts) - 1),
        sizes=sizes,
        closings=np.exp(rng.uniform(np.log(10), np.log(4 * 3600), classes)),
        horizon=float(rng.choice(HORIZONS)),
        offered=offered,
        startup=size.startup,
    )


def _held(rng: np.random.Generator, free: Counts, trainers: int, most: int) -> Counts:
    """Give seven in ten trainers up to twice their share, from classes in random order."""
    current = np.zeros((trainers, len(free)), dtype=np.int64)
    free, share = free.copy(), max(1, int(2 * free.sum() / trainers))
    for row in rng.permutation(trainers)[: 7 * trainers // 10]:
        wanted = int(rng.integers(1, min(most, share) + 1))
        for index in rng.permutation(len(free)):
            current[row, index] = min(wanted, free[index])
            free[index] -= current[row, index]
            wanted -= current[row, index]
    return current


def blind(case: WindowInstance) -> Counts:
    """Decide the counts as if no window closed before the horizon, then assign nodes by closing."""
    sizes = np.where(case.is_offered, 0, case.sizes)
    open_ = WindowInstance(
        **{name: getattr(case, name) for name in ("rates", "up", "down", "start", "checkpoint", "horizon")},
        current=case.totals[:, None],
        sizes=np.array([sizes.sum()]),
        closings=np.array([np.inf]),
    )
    one = np.zeros(len(case.sizes), dtype=np.int64)
    return WindowInstance(
        **{name: getattr(case, name) for name in ("rates", "up", "down", "start", "checkpoint", "horizon", "current")},
        sizes=sizes,
        closings=case.closings,
    ).divided(maximise_windows(open_, gap=0.0).counts, one)


def measure(size: Size, repeats: int) -> dict[str, Any]:
    """Solve `repeats` instances; return one row of the table."""
    times, gaps, blinds = [], [], []
    for seed in range(repeats):
        case = instance(seed, size)
        started = time.perf_counter()
        solution = maximise_windows(case, time_limit=size.seconds, gap=size.gap)
        times.append(time.perf_counter() - started)
        gaps.append((solution.bound - solution.objective) / solution.bound)
        blinds.append(1 - evaluate(case, blind(case)) / solution.objective)
    return {
        "trainers": size.trainers,
        "nodes": size.nodes,
        "classes": size.classes,
        "offered": size.offered,
        "instances": repeats,
        "ms_median": 1000 * float(np.median(times)),
        "ms_p90": 1000 * float(np.percentile(times, 90)),
        "ms_max": 1000 * max(times),
        "ms_limit": 1000 * size.seconds,
        "time_ratio": max(times) / size.seconds,
        "gap_mean_%": 100 * float(np.mean(gaps)),
        "gap_max_%": 100 * max(gaps),
        "gap_asked_%": 100 * size.gap,
        "gap_kept": f"{sum(gap <= size.gap for gap in gaps)}/{repeats}",
        "count_model_loss_%": 100 * float(np.mean(blinds)),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few instances")
    parser.add_argument("--repeats", type=int, default=None, help="instances of each size (default 20; quick 4)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    measure(SIZES[0], 2)  # warm-up: imports on first use
    rows = [measure(size, options.repeats or (4 if options.quick else 20)) for size in SIZES]
    report("Window-aware decisions", rows, ["highspy", "numpy"], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
