"""What the holes of several sites are worth together: against each alone, and against one machine of all nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl import __version__
from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.globus.sites.planning.model import SitesSettings, TransferRate
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.metrics import Yardstick, completion_times, log_figures, running_shares
from freetrain_parsl.extensions.replay.simulation import Curves, Knowledge, ReplaySettings
from freetrain_parsl.extensions.replay.sites.federation import replay_sites
from freetrain_parsl.extensions.replay.sites.logs import SiteLog, UnionLog, same_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.extensions.replay.comparison import Contestant, OnProgress
    from freetrain_parsl.extensions.replay.sites.federation import FederationOutcome
    from freetrain_parsl.extensions.replay.trainers import TrainerSet

__all__ = ["SiteTerms", "compare_sites"]

_HOUR = 3600.0
_NEVER = 1e12  # hysteresis that no move pays
_ROUNDING = 1e-4  # relative difference of values that is not worth a remark


@dataclass(frozen=True)
class SiteTerms:
    """What moves between sites take: `transfers` is (from site, to site) -> rate; other pairs have none."""

    settings: SitesSettings = field(default_factory=SitesSettings)
    transfers: Mapping[tuple[str, str], TransferRate] = field(default_factory=dict)
    state_bytes: float = 0.0


def compare_sites(
    sites: Sequence[SiteLog],
    trainers: TrainerSet,
    contestant: Contestant,
    settings: ReplaySettings | None = None,
    terms: SiteTerms | None = None,
    *,
    price_per_node_hour: float | None = None,
    on_progress: OnProgress = lambda _doing, _share: None,
) -> dict[str, Any]:
    """Replay the same training jobs at each site alone, at all without moves, at all with moves, and on one machine.

    Logs are cut to the length of the shortest one. Every site has the policy and the knowledge of the contestant.

    Returns
    -------
    dict
        Plain values, as written by ``freetrain replay --site … --json``.

    Raises
    ------
    InvalidSettings
        A combination of settings that several sites do not have, or two sites with the same name.
    InvalidInput
        No node is ever idle at any site.
    """
    settings, terms = replace(settings or ReplaySettings(), knowledge=contestant.knowledge), terms or SiteTerms()
    _refuse(sites, trainers, settings)
    cut = same_length(sites)
    union = UnionLog(cut)
    on_progress("oracle", 0.0)
    rates = BestRates(trainers.trainers, trainers.worth)
    yardstick = Yardstick.of(rates, union)
    on_progress("oracle", 1.0)

    def run(doing: str, some: Sequence[SiteLog], *, moves: bool = True) -> dict[str, Any]:
        chosen = terms.settings if moves else replace(terms.settings, hysteresis=_NEVER)
        outcome = replay_sites(
            some,
            rates,
            contestant.make,
            settings,
            partial(plan_sites, settings=chosen, objective=rates.objective),
            look=chosen.look.total_seconds(),
            transfers=terms.transfers,
            state_bytes={trainer.name: terms.state_bytes for trainer in trainers.trainers},
            on_progress=partial(on_progress, doing),
        )
        on_progress(doing, 1.0)
        return _way_figures(outcome, yardstick, price_per_node_hour)

    alone = [{"way": "alone", "site": site.name, **run(f"{site.name} alone", [site])} for site in cut]
    apart = {"way": "apart", "site": None, **run("without moves", cut, moves=False)}
    together = {"way": "together", "site": None, **run("together", cut)}
    one = {"way": "one machine", "site": None, **run("as one machine", [SiteLog(union.name, union)])}
    best = max(alone, key=lambda way: float(way["value"]))
    return {
        "version": __version__,
        "sites": [{"site": site.name, **log_figures(site.log)} for site in cut],
        "log": log_figures(union),
        "trainers": {"spec": trainers.name, "count": len(trainers.trainers), "objective": trainers.objective},
        "notes": [*_notes(sites, cut), *_note_on_moves(together["value"], apart["value"], together["moves"]["count"])],
        "policy": contestant.policy,
        "knowledge": contestant.knowledge.value,
        "objective": contestant.objective,
        "horizon": "adaptive" if contestant.horizon is None else contestant.horizon,
        "cost": settings.cost.value,
        "blocks_start_in": None if settings.blocks is None else settings.blocks.planner.startup.total_seconds(),
        "nodes_per_block": None if settings.blocks is None else settings.blocks.planner.max_nodes_per_block,
        "look": terms.settings.look.total_seconds(),
        "hysteresis": terms.settings.hysteresis,
        "state_bytes": terms.state_bytes,
        "transfers": [
            {"from": source, "to": site, "bytes_per_second": rate.bytes_per_second, "latency": rate.latency}
            for (source, site), rate in sorted(terms.transfers.items())
        ],
        "dedicated_nodes": yardstick.nodes,
        "oracle": yardstick.oracle / yardstick.dedicated if yardstick.dedicated else None,
        "best_alone": best["site"],
        "gain": {
            "over_best_alone": _ratio(together["value"], best["value"]),
            "useful_node_seconds": _ratio(together["useful_node_seconds"], best["useful_node_seconds"]),
            "over_apart": _ratio(together["value"], apart["value"]),
            "of_one_machine": _ratio(together["value"], one["value"]),
        },
        "ways": [*alone, apart, together, one],
    }


def _refuse(sites: Sequence[SiteLog], trainers: TrainerSet, settings: ReplaySettings) -> None:
    names = [site.name for site in sites]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidSettings(f"--site: two sites are named {min(twice)!r}; give each its own name")
    if trainers.sweeps:
        raise InvalidSettings(f"--trainers {trainers.name}: sweeps do not work with --site; give a list of trainers")
    if settings.knowledge is Knowledge.ESTIMATED:
        raise InvalidSettings("--knowledge estimated: does not work with --site; use none or perfect")
    if settings.curves is not Curves.KNOWN:
        raise InvalidSettings(f"--curves {settings.curves.value}: does not work with --site; use known")
    if settings.concurrent is not None:
        raise InvalidSettings(
            "--concurrent: does not work with --site, where training jobs wait at a site; leave it out"
        )


def _notes(sites: Sequence[SiteLog], cut: Sequence[SiteLog]) -> list[str]:
    return [
        f"the log of {site.name} lasts {(site.log.end - site.log.start) / _HOUR:.4g} h and was cut to the shortest "
        f"one's {(part.log.end - part.log.start) / _HOUR:.4g} h"
        for site, part in zip(sites, cut, strict=True)
        if site.log is not part.log
    ]


def _note_on_moves(moved: float, stayed: float, moves: int) -> list[str]:
    """Report that moves have cost more than they have gained, if they have."""
    if not moved < stayed * (1 - _ROUNDING):
        return []
    note = (
        f"with moves the sites do {100 * (1 - moved / stayed):.2g} % less than without: what each of the {moves:,} "
        "moves gains until the next look is an estimate, which is poor where nodes are few or idle irregularly"
    )
    return [note]


def _way_figures(outcome: FederationOutcome, yardstick: Yardstick, price: float | None) -> dict[str, Any]:
    lost, twice = outcome.audit()
    accounts = [stint.account for stints in outcome.stints.values() for stint in stints]
    outcomes = outcome.sites.values()
    values = np.sum([one.bins.sums("value") for one in outcomes], axis=0)
    used = sum(one.used_seconds for one in outcomes)
    solves = np.array([seconds for seconds, _ in outcome.plans]) * 1000
    dedicated = np.cumsum(yardstick.dedicated_bins.sums("value"))
    bins = next(iter(outcomes)).bins
    return {
        "value": outcome.value,
        "efficiency": _ratio(outcome.value, yardstick.dedicated),
        "useful_node_seconds": sum(account.node_seconds - account.lost_node_seconds for account in accounts),
        "node_hours": {"idle": sum(one.idle_seconds for one in outcomes) / _HOUR, "used": used / _HOUR},
        "idle_cost": None if price is None else {"price_per_node_hour": price, "used": price * used / _HOUR},
        "losses": {
            "rescale": _ratio(sum(one.losses.rescale for one in outcomes), yardstick.dedicated),
            "preemption": _ratio(sum(one.losses.preemption for one in outcomes), yardstick.dedicated),
            "start": _ratio(sum(one.losses.start for one in outcomes), yardstick.dedicated),
        },
        "refused": sum(one.refused for one in outcomes),
        "jct": completion_times(outcome.times_to_finish()),
        "samples_lost": lost,
        "duplicate_samples": twice,
        "plans": {
            "count": len(solves),
            "solve_ms": {"median": float(np.median(solves)), "max": float(solves.max())} if len(solves) else None,
            "proven_optimal_share": float(np.mean([proven for _, proven in outcome.plans])) if len(solves) else None,
        },
        "moves": _move_figures(outcome),
        "trainers": [
            {
                "name": name,
                "samples": stints[-1].end if stints else 0.0,
                "stints": [
                    {
                        "site": stint.site,
                        "came": stint.came,
                        "left": None if math.isinf(stint.left) else stint.left,
                        "samples": stint.account.samples,
                        "node_hours": stint.account.node_seconds / _HOUR,
                    }
                    for stint in stints
                ],
            }
            for name, stints in outcome.stints.items()
        ],
        "wall_seconds": outcome.wall_seconds,
        "series": {
            "time": [round(number * bins.seconds, 3) for number in range(bins.number)],
            "bin_seconds": bins.seconds,
            "efficiency": running_shares(values, dedicated),
        },
    }


def _move_figures(outcome: FederationOutcome) -> dict[str, Any]:
    links: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for move in outcome.moves:
        links[move.source, move.target].append((move.seconds, move.size))
    return {
        "count": len(outcome.moves),
        "seconds": sum(move.seconds for move in outcome.moves),
        "bytes": sum(move.size for move in outcome.moves),
        "links": [
            {
                "from": source,
                "to": target,
                "count": len(each),
                "seconds": sum(seconds for seconds, _ in each),
                "bytes": sum(size for _, size in each),
            }
            for (source, target), each in sorted(links.items())
        ],
    }


def _ratio(value: float, whole: float) -> float | None:
    return value / whole if whole else None
