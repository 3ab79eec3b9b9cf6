"""Compare policies on a recorded idle log: their results, and their decision times.

``python benchmarks/replay_policies.py LOG.csv.gz`` replays the whole log, and a slice of it with fewer nodes and
hours for which the published node-level model is solved too, by CBC, as published: M = N + 1, and when a solve reaches
the cap the allocation stays unchanged. All replays run in sequence, in one process on one thread. The log may be any
that ``freetrain replay`` reads; if it has walltimes, the window policy also runs with estimated closings.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _report import report

from freetrain_parsl.extensions.replay.comparison import Contestant, compare
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.simulation import Knowledge
from freetrain_parsl.extensions.replay.trainers import trainer_set
from freetrain_parsl.planning.model import Allocation, Decision, PlannedJob, Pool
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import POLICIES, Policy
from freetrain_parsl.testing.instances import Instance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.extensions.replay.holes import HoleLog

try:
    from _published import solve_published
except ImportError:  # python-mip is of the extra cbc; without it the published model is omitted
    solve_published = None  # type: ignore[assignment] # the baseline is missing

CAP = 10.0  # seconds per solve, as published
KEYS = (
    "efficiency",
    "oracle_ratio",
    "loss_concavity",
    "loss_rescale",
    "loss_preemption",
    "loss_unused",
    "loss_split",
)


class PublishedPolicy(Policy):
    """The published model; horizon and objective as in the replay."""

    name = "published"

    def __init__(self, objective: str, *, horizon: Any) -> None:
        self._objective = OBJECTIVES[objective]
        self._horizon = 120.0 if horizon is None else horizon.total_seconds()

    def allocate(self, pool: Pool, trainers: Sequence[PlannedJob], current: Allocation, now: float) -> Decision:
        """Solve it, or keep the allocation if the cap is reached."""
        started = time.perf_counter()
        if not pool:
            return Decision({}, 0.0, proven_optimal=True, bound=0.0)
        held = {name: kept for name, nodes in current.items() if (kept := nodes & pool.keys())}
        case = Instance(pool, tuple(trainers), held, now)
        answer = solve_published(case, self._objective, self._horizon, len(pool) + 1, CAP)
        seconds = time.perf_counter() - started
        if not answer.finished:
            return Decision(held, 0.0, proven_optimal=False, bound=float("inf"), solve_seconds=seconds)
        value = answer.objective or 0.0
        return Decision(answer.allocation, value, proven_optimal=True, bound=value, solve_seconds=seconds)


def slice_of(log: HoleLog, nodes: int, hours: float, folder: Path) -> HoleLog:
    """Write the windows of the first nodes by name, in the hours in which they are idle most, to a separate log."""
    holes = [hole for change in log.changes() for hole in change.opened]
    names = set(sorted({hole.node for hole in holes})[:nodes])
    holes = [hole for hole in holes if hole.node in names]
    seconds = min(3600 * hours, log.end - log.start)
    steps = max(1, math.ceil((log.end - log.start - seconds) / (seconds / 4)))
    starts = [log.start + (log.end - log.start - seconds) * step / steps for step in range(steps + 1)]

    def idle(start: float) -> float:
        return sum(max(0.0, min(h.end, start + seconds) - max(h.start, start)) for h in holes)

    start = max(starts, key=idle)
    cut = [(h.node, max(h.start, start), min(h.end, start + seconds)) for h in holes]
    file = folder / f"{nodes}x{hours:g}h.csv"
    rows = [f"{node},{opens},{closes}" for node, opens, closes in cut if opens < closes]
    file.write_text("\n".join(["node,start,end", *rows, ""]), encoding="utf-8")
    return open_log(file, nodes=nodes)


def rows_of(log: HoleLog, spec: str, contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Replay, and make one row per policy and one for the oracle."""
    result = compare(log, trainer_set(spec), contestants)
    rows = [
        {
            "log": log.name,
            "trainers": spec,
            "policy": entry["policy"],
            "knowledge": entry["knowledge"],
            "events": entry["events"],
            **{key: entry[key] for key in KEYS},
            "solve_ms_median": entry["solve_ms"]["median"],
            "solve_ms_max": entry["solve_ms"]["max"],
            "proven": entry["proven_optimal_share"],
            "wall_s": entry["wall_seconds"],
        }
        for entry in result["policies"]
    ]
    oracle = dict.fromkeys(rows[0]) | {"log": log.name, "trainers": spec, "policy": "oracle", "oracle_ratio": 1.0}
    oracle |= {"efficiency": result["policies"][0]["oracle"], "loss_concavity": result["policies"][0]["loss_concavity"]}
    return [*rows, oracle]


def main() -> None:
    """Replay and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="idle log or job log, as for `freetrain replay`")
    parser.add_argument("--nodes", type=int, help="size of the cluster")
    parser.add_argument("--trainers", nargs="+", default=["hpo:10"], help="sets, as for `freetrain replay`")
    parser.add_argument("--slice", nargs=2, type=float, default=(128, 24), metavar=("NODES", "HOURS"))
    parser.add_argument("--only-slice", action="store_true", help="omit the replay of the whole log")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()

    log = open_log(options.log, nodes=options.nodes)
    ours = [
        Contestant("milp"),
        Contestant("window"),
        Contestant("window", Knowledge.PERFECT),
        Contestant("equal-share"),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for spec in options.trainers:
            objective = trainer_set(spec).objective
            contestants = [Contestant(one.policy, one.knowledge, objective) for one in ours]
            known = [Contestant("window", Knowledge.ESTIMATED, objective)] if log.has_forecasts else []
            part = slice_of(log, int(options.slice[0]), options.slice[1], Path(folder))
            first: list[Contestant] = []
            if solve_published is None:
                print("python-mip is not installed: the published model is omitted", file=sys.stderr)
            else:
                POLICIES["published"] = PublishedPolicy
                first = [Contestant("published", objective=objective)]
            rows += rows_of(part, spec, [*first, *contestants])
            if not options.only_slice:
                rows += rows_of(log, spec, [*contestants, *known])
    report("Policies on a recorded log", rows, ["freetrain-parsl", "highspy", "numpy", "mip"], options.json)


if __name__ == "__main__":
    main()
