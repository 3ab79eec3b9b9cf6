"""What two sites with complementary holes are worth together, by replay: value, moves, and an audit of samples.

Each seed makes two sites whose phases of many and of few idle nodes are opposite, with random holes in both, and
replays the same training jobs at each site alone, at both without moves, and at both with moves. Useful node-seconds
are those held by training jobs less those that changes have cost. `samples_lost` and `duplicate_samples` are gaps and
overlaps between what a training job had done when it left a site and what it began with at the next one.

With ``--live``, two embedded clusters with real endpoints and drivers, and stand-ins of Globus' services: the same
campaign at each site alone and at both, for as many seconds, while neighbours take the nodes. Useful node-seconds are
then the training steps that were done, times their duration. Fetches are the moves' copies from home. In each way, the
phases begin when it is at work: the first start of drivers, which is not repeated, is not counted, but that after each
move is.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import report

from freetrain_parsl.extensions.globus.sites.planning.model import SitesSettings
from freetrain_parsl.extensions.replay.comparison import Contestant
from freetrain_parsl.extensions.replay.logs.idle_log import IDLE_HEADER
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.simulation import Cost, ReplaySettings
from freetrain_parsl.extensions.replay.sites.comparison import SiteTerms, compare_sites
from freetrain_parsl.extensions.replay.sites.logs import SiteLog
from freetrain_parsl.extensions.replay.sites.options import same_rate
from freetrain_parsl.extensions.replay.trainers import trainer_set

if TYPE_CHECKING:
    from freetrain_parsl.extensions.replay.holes import HoleLog

NAMES = ("day", "night")
SHARE_MANY, SHARE_FEW = 0.8, 0.1  # of the nodes that are idle in a phase, on average
MEAN_HOLE = 1800.0  # seconds


def complementary_log(number: int, seed: int, nodes: int, hours: float, phase: float, folder: Path) -> HoleLog:
    """Write and open the log of a site whose nodes are mostly idle in every other phase.

    A node's idle and busy times are exponential, with the share of idle time that its phase has. Phases of site 0 and
    site 1 are opposite.

    Parameters
    ----------
    number
        0 or 1.
    seed
        Of the holes.
    nodes, hours
        Size and length.
    phase
        Hours of each phase.
    folder
        Where to write.
    """
    rng = np.random.default_rng([seed, number])
    end = 3600 * hours
    lines = [IDLE_HEADER]
    for node in range(nodes):
        now, idle = 0.0, None
        while now < end:
            many = int(now / (3600 * phase)) % 2 == number
            share = SHARE_MANY if many else SHARE_FEW
            idle = rng.random() < share if idle is None else not idle
            # The time left in the phase bounds each time: it is drawn anew in the next phase.
            mean = MEAN_HOLE if idle else MEAN_HOLE * (1 - share) / share
            until = min(now + max(1.0, rng.exponential(mean)), 3600 * phase * (int(now / (3600 * phase)) + 1), end)
            if idle and until > now:
                lines.append(f"n{node:03d},{now:.3f},{until:.3f}")
            if until - now < 1.0 or until % (3600 * phase) == 0:
                idle = None
            now = until
    lines += [f"edge,0,0.001\nedge,{end - 0.001:.3f},{end:.3f}"]  # both logs cover the same time
    path = folder / f"{NAMES[number]}-{seed}.csv"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return open_log(path, nodes=nodes + 1)


def row(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Replay one pair of sites."""
    trainers = trainer_set(f"hpo:{options.trainings}")
    most = max(1, options.nodes // options.trainings)
    trainers = replace(trainers, trainers=tuple(replace(one, max_nodes=most) for one in trainers.trainers))
    with tempfile.TemporaryDirectory() as folder:
        sites = [
            SiteLog(
                name,
                complementary_log(number, seed, options.nodes, options.hours, options.phase, Path(folder)),
            )
            for number, name in enumerate(NAMES)
        ]
        result = compare_sites(
            sites,
            trainers,
            Contestant("milp", objective=trainers.objective),
            ReplaySettings(cost=Cost.FULL),
            SiteTerms(
                SitesSettings(look=timedelta(seconds=options.look)),
                same_rate(NAMES, options.rate),
                options.state * 1e6,
            ),
        )
    together = next(way for way in result["ways"] if way["way"] == "together")
    best = max((way for way in result["ways"] if way["way"] == "alone"), key=lambda way: way["useful_node_seconds"])
    return {
        "seed": seed,
        "useful_node_seconds": together["useful_node_seconds"],
        "best_single": best["useful_node_seconds"],
        "ratio": together["useful_node_seconds"] / best["useful_node_seconds"],
        "over_without_moves": result["gain"]["over_apart"],
        "of_one_machine": result["gain"]["of_one_machine"],
        "moves": together["moves"]["count"],
        "move_seconds": together["moves"]["seconds"],
        "move_bytes": together["moves"]["bytes"],
        "samples_lost": together["samples_lost"],
        "duplicate_samples": together["duplicate_samples"],
        "median_plan_ms": together["plans"]["solve_ms"]["median"],
        "proven_optimal": together["plans"]["proven_optimal_share"],
    }


def main() -> None:
    """Run all seeds and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of sites")
    parser.add_argument("--nodes", type=int, default=24, help="nodes of each site")
    parser.add_argument("--hours", type=float, default=12.0, help="length of the logs")
    parser.add_argument("--phase", type=float, default=3.0, help="hours of each phase")
    parser.add_argument("--trainings", type=int, default=4, help="ShuffleNets, which together can use one site's nodes")
    parser.add_argument("--state", type=float, default=1000.0, help="MB of a training job's state")
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s between the sites")
    parser.add_argument("--look", type=float, default=600.0, help="seconds between decisions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--live", action="store_true", help="two embedded clusters instead of the replay")
    parser.add_argument("--seconds", type=float, default=320.0, help="live: length of each run")
    parser.add_argument("--live-phase", type=float, default=160.0, help="live: seconds of each phase")
    parser.add_argument("--live-look", type=float, default=60.0, help="live: seconds between decisions")
    parser.add_argument(
        "--default-periods", type=float, metavar="SECONDS", help="live: count requests with the default periods instead"
    )
    parser.add_argument("--parameters", type=int, default=1_000_000, help="live: of each training job's model")
    options = parser.parse_args()
    if options.default_periods is not None:
        from _live_sites import requests_row

        packages = ("freetrain-parsl", "globus-sdk", "globus-compute-endpoint")
        report("requests of a campaign at two sites", [requests_row(options)], packages, options.json)
        return
    if options.live:
        from _live_sites import live_row

        rows = [live_row(seed, options) for seed in range(options.seeds)]
        packages = ("freetrain-parsl", "globus-sdk", "globus-compute-endpoint")
        report("two live sites with complementary holes", rows, packages, options.json)
        return
    rows = [row(seed, options) for seed in range(options.seeds)]
    report("two sites with complementary holes, by replay", rows, ("freetrain-parsl", "highspy"), options.json)


if __name__ == "__main__":
    main()
