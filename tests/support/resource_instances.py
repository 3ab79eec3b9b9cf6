"""Random instances of the problem with several resources, for tests and benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.resources.demands import ResourceJob
from freetrain_parsl.extensions.resources.instances import WORKER_MBPS, LayeredTraining
from freetrain_parsl.settings_checks import check_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

__all__ = ["generate_instance"]

_HOUR = 3600.0


@dataclass(frozen=True)
class _Network:
    """A family of jobs: layers, milliseconds of a forward pass per sample, megabytes of parameters."""

    layers: int
    forward_ms: float
    megabytes: float


_NETWORKS: Mapping[str, _Network] = {
    "alexnet": _Network(8, 0.233, 233),
    "googlenet": _Network(12, 0.5, 27),
    "inception": _Network(14, 1.9, 92),
    "lstm": _Network(4, 0.667, 250),
    "mobilenet": _Network(14, 0.2, 17),
    "resnet50": _Network(16, 1.367, 98),
    "transformer": _Network(12, 3.667, 420),
    "vgg16": _Network(16, 5.167, 528),
}
_RESOURCES = ("gpu", "cpu", "memory", "disk")
_WORKER = ((1, 4), (1, 10), (2, 32), (5, 10))  # least and most of each resource
_SERVER = ((0, 0), (1, 10), (2, 32), (5, 10))
_AT_LIMIT = (4, 20)  # workers, and servers, that the job's own limit is made for


def generate_instance(jobs: int, *, load: float, seed: int) -> dict[str, Any]:
    """Return a random instance as the document that `parse_instance` reads.

    Each job is one of eight networks. Its limit is what 4 to 20 workers and 4 to 20 servers need, and within that it
    takes at least 0.3 to 1.2 times its critical time. A tenth of the jobs do not care about time, and for a third it is
    a deadline.

    Parameters
    ----------
    jobs
        Number of jobs.
    load
        Sum of the jobs' limits as a multiple of the capacity, the same for all resources.
    seed
        The same seed gives the same instance.

    Raises
    ------
    InvalidSettings
        No jobs, or a load that is not positive.
    """
    check_count("jobs of an instance", jobs)
    if not (math.isfinite(load) and load > 0):
        raise InvalidSettings(f"the load of an instance must be positive, got {load!r}")
    rng = np.random.default_rng(seed)
    made = [_random_job(rng, index) for index in range(jobs)]
    wanted = np.sum([job["limit"] for job in made], axis=0)
    # A job that is alone, or a high load, must not make the cluster too small for one worker and one server.
    least = np.max([np.add(job["worker"], job["server"]) for job in made], axis=0)
    capacity = np.maximum(np.ceil(wanted / load), least)
    return {
        "seed": seed,
        "load": load,
        "resources": list(_RESOURCES),
        "capacity": capacity.tolist(),
        "jobs": made,
    }


def _random_job(rng: np.random.Generator, index: int) -> dict[str, Any]:
    name = str(rng.choice(list(_NETWORKS)))
    network = _NETWORKS[name]
    shares, sizes = rng.dirichlet(np.ones(network.layers), 2)
    forward = network.forward_ms / 1000 * shares
    worker, server = ([int(rng.integers(low, high + 1)) for low, high in ranges] for ranges in (_WORKER, _SERVER))
    workers, servers = rng.integers(_AT_LIMIT[0], _AT_LIMIT[1] + 1, 2)
    limit = [int(workers * one + servers * other) for one, other in zip(worker, server, strict=True)]
    batch, rate = int(rng.integers(32, 513)), float(rng.uniform(300, 1250))
    critical = float(rng.uniform(1, 15))
    training = LayeredTraining(
        tuple(forward), tuple(2 * forward), tuple(network.megabytes * sizes), batch, WORKER_MBPS, rate
    )
    job = ResourceJob(name, tuple(worker), tuple(server), tuple(limit), training.step_seconds, float)
    step = job.combinations.seconds.min()
    seconds = critical * _HOUR * float(rng.uniform(0.3, 1.2))
    return {
        "name": f"{name}-{index}",
        "forward": _rounded(forward),
        "backward": _rounded(2 * forward),
        "size": _rounded(network.megabytes * sizes),
        "batch": batch,
        "worker": worker,
        "server": server,
        "server_MBps": round(rate, 2),
        "limit": limit,
        "t1": round(float(rng.uniform(1, 100)), 4),
        "t2": _steepness(rng),
        "t3": round(critical, 4),
        "iterations": max(1, round(seconds / step)),
    }


def _steepness(rng: np.random.Generator) -> float:
    """Draw how a job cares about time, per hour: 10 % not at all, 55 % gradually, 35 % as about a deadline."""
    kind = rng.random()
    if kind < 0.1:
        return 0.0
    return round(float(rng.uniform(0.01, 1.0) if kind < 0.65 else rng.uniform(4, 6)), 4)


def _rounded(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
