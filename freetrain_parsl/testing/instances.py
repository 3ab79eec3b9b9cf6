"""Random allocation problems, reproducible from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import Allocation, CostsInSeconds, PlannedJob, Pool, PoolNode
from freetrain_parsl.planning.sizes import AllowedCounts

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Instance", "SpreadRate", "random_instance", "restricted", "shared_hosts_instance"]


@dataclass(frozen=True)
class Instance:
    """The arguments of one `Policy.allocate`."""

    pool: Pool
    trainers: tuple[PlannedJob, ...]
    current: Allocation
    now: float = 0.0


def random_instance(seed: int, *, max_trainers: int = 8, max_nodes: int = 24) -> Instance:
    """Make a small problem with all difficulties that a policy must handle.

    Curves that are neither concave nor monotone, rates of zero, trainers larger than the pool, costs from
    nothing to prohibitive, nodes that close at known and unknown times, trainers that have lost nodes.
    """
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(0, max_nodes + 1))
    trainers = [_odd_trainer(rng, index, max_nodes) for index in range(int(rng.integers(0, max_trainers + 1)))]
    lost = [f"lost{index}" for index in range(4)]
    return Instance(
        pool(rng, nodes, closing=0.5),
        tuple(trainers),
        running(rng, trainers, [*node_names(nodes), *lost]),
        now=float(rng.uniform(0, 1000)),
    )


@dataclass(frozen=True)
class SpreadRate:
    """A rate by placement: that of the curve, reduced for each host beyond the fewest.

    Parameters
    ----------
    curve
        Rates on the fewest hosts.
    nodes_per_host
        Nodes of each host.
    kept
        Share of the rate that is left with another host.
    """

    curve: ScalingCurve
    nodes_per_host: int
    kept: float

    def __call__(self, placement: tuple[int, ...]) -> float:
        """Return the rate; see `freetrain_parsl.planning.model.PlacedRate`."""
        fewest = -(-sum(placement) // self.nodes_per_host)
        return self.curve(sum(placement)) * self.kept ** (len(placement) - fewest)


def shared_hosts_instance(seed: int, *, hosts: int = 4, nodes_per_host: int = 4, trainers: int = 6) -> Instance:
    """Make a problem in which nodes share hosts, such as accelerators, and batches are chosen.

    Curves are goodputs at the best batch size: throughput grows with the nodes, but each sample is worth less in a
    larger batch. Trainers are slower on more hosts than necessary. Some hosts have lost nodes, and some trainers are
    spread over hosts.
    """
    rng = np.random.default_rng(seed)
    nodes = [
        PoolNode(f"host{host}/{slot}", host=f"host{host}")
        for host in range(hosts)
        for slot in range(nodes_per_host)
        if rng.random() > 0.1
    ]
    made = [_elastic_trainer(rng, index, hosts * nodes_per_host, nodes_per_host) for index in range(trainers)]
    pool = Pool(nodes, slots_per_host=nodes_per_host)
    return Instance(pool, tuple(made), running(rng, made, [node.name for node in nodes]), now=0.0)


def _elastic_trainer(rng: np.random.Generator, index: int, nodes: int, nodes_per_host: int) -> PlannedJob:
    low = int(rng.choice([1, 1, 1, 2, 3, nodes_per_host + 1]))
    high = min(nodes, low * int(rng.choice([1, 4, 8])))
    rate, noise, power = float(rng.uniform(10, 1000)), float(rng.uniform(1, 100)), float(rng.uniform(0.7, 1.0))
    # The worth of a step at n times the initial batch, relative to n steps; McCandlish et al., 2018.
    points = {count: rate * count**power * (noise + 1) / (noise + count) for count in range(1, high + 1)}
    curve = ScalingCurve(points)
    return PlannedJob(
        f"trainer{index}",
        low,
        high,
        curve,
        CostsInSeconds(*(30.0 * rng.random(3)).tolist()),
        work_left=float(rng.uniform(1e3, 1e7)),
        submitted=float(index),
        service=float(rng.choice([0.0, 1e5])),
        placed=SpreadRate(curve, nodes_per_host, float(rng.uniform(0.3, 1.0))),
    )


def restricted(trainers: Iterable[PlannedJob], seed: int) -> list[PlannedJob]:
    """Return the trainers, most of which may have some of the counts within their bounds only."""
    rng = np.random.default_rng(seed)
    result = []
    for trainer in trainers:
        some = int(rng.integers(trainer.min_nodes, trainer.max_nodes + 1))  # is allowed, so that there is a count
        multiple = int(rng.choice([n for n in (1, 2, 3, 4) if some % n == 0]))
        allowed = AllowedCounts(multiple, int(rng.choice([0, 1, 2, 3, 12])) * some)
        result.append(replace(trainer, allowed_counts=allowed) if rng.random() < 0.7 else trainer)
    return result


def node_names(nodes: int) -> list[str]:
    return [f"node{index:04d}" for index in range(nodes)]


def pool(rng: np.random.Generator, nodes: int, *, closing: float) -> Pool:
    """Make nodes; the fraction `closing` of them closes at one of a few known times."""
    times = rng.uniform(1000, 5000, size=4)
    return Pool(
        PoolNode(name, float(rng.choice(times)) if rng.random() < closing else None) for name in node_names(nodes)
    )


def _odd_trainer(rng: np.random.Generator, index: int, max_nodes: int) -> PlannedJob:
    low = int(rng.integers(1, max_nodes // 3 + 2))
    high = low + int(rng.integers(0, max_nodes + 2))
    counts = {low, *rng.integers(low, high + 3, size=int(rng.integers(0, 6))).tolist()}
    scale = rng.choice([0.0, 1.0, 1000.0])
    costs = rng.choice([0.0, 10.0, 1000.0]) * rng.random(3)
    return PlannedJob(
        name=f"trainer{index}",
        min_nodes=low,
        max_nodes=high,
        curve=ScalingCurve({count: float(scale * rng.random() * count ** rng.uniform(0, 1.5)) for count in counts}),
        costs=CostsInSeconds(*costs.tolist()),
        priority=float(rng.uniform(0.5, 4)),
        submitted=float(index),
    )


def running(rng: np.random.Generator, trainers: list[PlannedJob], names: list[str]) -> Allocation:
    """Give most trainers a random allowed number of nodes, while nodes are left."""
    free = rng.permutation(names).tolist()
    current = {}
    for index in rng.permutation(len(trainers)):
        trainer = trainers[index]
        most = min(trainer.max_nodes, len(free), max(trainer.min_nodes, 3 * len(names) // len(trainers)))
        if most < trainer.min_nodes or rng.random() < 0.33:
            continue
        count = int(rng.integers(trainer.min_nodes, most + 1))
        current[trainer.name] = frozenset(free[:count])
        free = free[count:]
    return current
