"""Random situations of several sites, reproducible from a seed, and their optimum by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np

from freetrain_parsl.extensions.globus.sites.planning.model import (
    Offer,
    SitesQuestion,
    SiteTraining,
    SiteView,
    TransferRate,
)
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.objectives.base import SPEEDUP, Objective

__all__ = ["best_site_value", "random_sites", "site_value"]

_HOME = "archive"  # a collection that is no site


def random_sites(seed: int, *, max_sites: int = 3, max_trainings: int = 4, max_nodes: int = 6) -> SitesQuestion:
    """Make a small situation with all difficulties that a planner over sites must handle.

    Silent sites, leases that have ended, state in transit, state only where no transfer rate is known, offers that
    close before the next look, curves that are neither concave nor monotone, work that ends soon, prohibitive moves.
    """
    rng = np.random.default_rng(seed)
    names = [f"site{index}" for index in range(int(rng.integers(1, max_sites + 1)))]
    collections = [*names, _HOME]
    now, horizon = float(rng.uniform(0, 1000)), float(rng.choice([60.0, 600.0, 3600.0]))
    sites = tuple(
        SiteView(
            name,
            tuple(
                Offer(int(rng.integers(0, max_nodes // 2 + 1)), float(rng.choice([30.0, 500.0, math.inf])))
                for _ in range(int(rng.integers(0, 3)))
            ),
            answers=bool(rng.random() < 0.8),
        )
        for name in names
    )
    transfers = {
        (source, site): TransferRate(float(rng.choice([1e6, 1e8, 1e10])), float(rng.choice([0.0, 10.0])))
        for source in collections
        for site in names
        if source != site and rng.random() < 0.8
    }
    count = int(rng.integers(0, max_trainings + 1))
    return SitesQuestion(
        now,
        horizon,
        sites,
        tuple(_training(rng, index, names, collections, now, max_nodes) for index in range(count)),
        transfers,
    )


def _training(
    rng: np.random.Generator, index: int, names: list[str], collections: list[str], now: float, max_nodes: int
) -> SiteTraining:
    low = int(rng.integers(1, max_nodes // 2 + 1))
    high = low + int(rng.integers(0, max_nodes // 2 + 1))
    rates = {n: float(rng.choice([0.0, 1.0, 100.0]) * rng.random() * n ** rng.uniform(0, 1.5)) for n in {1, low, high}}
    trainer = PlannedJob(
        f"training{index}",
        low,
        high,
        ScalingCurve(rates, relative=bool(rng.random() < 0.2)),
        CostsInSeconds(*(float(rng.choice([0.0, 5.0, 100.0])) for _ in range(3))),
        work_left=float(rng.choice([50.0, 5000.0, math.inf])),
        submitted=float(rng.integers(0, 3)),
    )
    site = str(rng.choice(names)) if rng.random() < 0.7 else None
    nodes = int(rng.integers(1, high + 2)) if site is not None and rng.random() < 0.6 else 0
    saved = rng.random() < 0.7
    return SiteTraining(
        trainer,
        state_bytes=float(rng.choice([0.0, 1e8, 1e11])),
        checkpoints=frozenset(rng.choice(collections, size=int(rng.integers(1, 3))).tolist()) if saved else frozenset(),
        site=site,
        nodes=nodes,
        lease_until=now + float(rng.choice([-10.0, 0.0, 300.0])),
        arrives=now + float(rng.choice([-10.0, 40.0])) if site is not None and not nodes else -math.inf,
    )


def site_value(
    question: SitesQuestion,
    training: SiteTraining,
    site: str | None,
    nodes: int,
    hysteresis: float = 0.0,
    objective: Objective = SPEEDUP,
) -> float:
    """Return the value of a training job on `nodes` nodes of a site until the next look, term by term.

    Minus infinity if that is not allowed. The planner's module has the formula; `nodes` may be zero.
    """
    trainer, costs = training.trainer, training.trainer.costs
    answering = {view.name for view in question.sites if view.answers}
    owner = training.site if training.site in answering else None
    allowed = range(trainer.min_nodes, trainer.max_nodes + 1)
    nearest = min(allowed, key=lambda n: abs(n - training.nodes))
    rate_now = objective(trainer, nearest) if training.nodes and owner is not None else 0.0
    if nodes == 0:
        return -costs.down * rate_now
    if nodes not in allowed or site not in answering:
        return -math.inf
    wait = training.arrives - question.now
    if owner is not None and wait > 0 and site != owner:
        return -math.inf
    lost, cost = 0.0, 0.0
    if site == owner and training.nodes:
        cost = rate_now * (costs.up * (nodes > training.nodes) + costs.down * (nodes < training.nodes))
    elif site == owner:
        lost = max(wait, 0.0) + costs.start
    else:
        sources = {owner} if training.nodes and owner is not None else set(training.checkpoints)
        transfer = 0.0
        if sources and site not in sources:
            rates = [question.transfers[source, site] for source in sources if (source, site) in question.transfers]
            transfer = min((rate.seconds(training.state_bytes) for rate in rates), default=math.inf)
        lost = transfer + costs.start
        if lost >= question.horizon:
            return -math.inf
        cost = costs.down * rate_now
        if owner is not None:
            cost += max(1.0, hysteresis * lost) * objective(trainer, nodes)
    seconds = max(0.0, question.horizon - lost)
    if not trainer.curve.relative and trainer.rate(nodes) > 0:
        seconds = min(seconds, trainer.work_left / trainer.rate(nodes))
    return seconds * objective(trainer, nodes) - cost


def best_site_value(question: SitesQuestion, hysteresis: float = 0.0, objective: Objective = SPEEDUP) -> float:
    """Return the largest total value of any assignment of the jobs that no silent site owns, by enumeration."""
    answering = {view.name: view for view in question.sites if view.answers}
    free = [
        training
        for training in question.trainings
        if training.site is None or training.site in answering or training.lease_until <= question.now
    ]
    ways = []
    for training in free:
        pairs = [(None, 0), *((site, n) for site in answering for n in range(1, training.trainer.max_nodes + 1))]
        valued = [(*pair, site_value(question, training, *pair, hysteresis, objective)) for pair in pairs]
        ways.append([way for way in valued if math.isfinite(way[2])])
    best = -math.inf
    for combination in itertools.product(*ways):
        used = {site: sum(nodes for at, nodes, _ in combination if at == site) for site in answering}
        if all(used[site] <= view.mean_nodes(question.horizon) + 1e-9 for site, view in answering.items()):
            best = max(best, sum(value for _, _, value in combination))
    return best
