"""Random allocation problems of a given size, similar to real ones."""

from __future__ import annotations

import numpy as np

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.testing.instances import Instance, node_names, pool, running

__all__ = ["measured_like_instance"]


def measured_like_instance(seed: int, *, trainers: int, nodes: int) -> Instance:
    """Make a problem of a given size with curves similar to real training jobs.

    A rate of 1000-7000 samples per second on one node; each doubling gains a factor 1.55-2.03, as in the
    measurements of seven ImageNet models on Summit in BFTrainer (arXiv 2106.12091), and one point in ten
    falls short by up to 40 %, so that few curves are concave and some are not monotone. Rescaling costs 17-19
    seconds up and 11-13 down, as there. About two thirds of the trainers are already running.
    """
    rng = np.random.default_rng(seed)
    made = [_real_trainer(rng, index, nodes) for index in range(trainers)]
    return Instance(pool(rng, nodes, closing=0.5), tuple(made), running(rng, made, node_names(nodes)))


def _real_trainer(rng: np.random.Generator, index: int, nodes: int) -> PlannedJob:
    low = int(rng.choice([1, 1, 1, 2, 4]))
    high = max(low, int(rng.choice([nodes // 8, nodes // 4, nodes // 2, nodes])))
    points, rate, count = {}, float(rng.uniform(1000, 7000)), 1
    while count <= high:
        points[count] = rate * (rng.uniform(0.6, 1.0) if rng.random() < 0.1 else 1.0)
        rate, count = rate * rng.uniform(1.55, 2.03), 2 * count
    return PlannedJob(
        name=f"trainer{index:03d}",
        min_nodes=low,
        max_nodes=high,
        curve=ScalingCurve(points),
        costs=CostsInSeconds(
            up=float(rng.uniform(17, 19)), down=float(rng.uniform(11, 13)), start=float(rng.uniform(5, 20))
        ),
        submitted=float(index),
    )
