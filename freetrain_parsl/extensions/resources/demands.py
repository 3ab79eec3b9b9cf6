"""Kinds of resources, the combinations of workers and servers that jobs can have of them, and what these are worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.planning.solvers.multiple_choice import fits

__all__ = [
    "MOST_OF_EACH",
    "Combination",
    "Combinations",
    "Completion",
    "ResourceJob",
    "ResourceProblem",
    "SigmoidUtility",
    "Utility",
]

Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MOST_OF_EACH = 40
"""Most workers, and most servers, of a combination."""

Completion = Callable[[Counts, Counts], Table]
"""Numbers of workers and of servers -> completion times in seconds."""
Utility = Callable[[float], float]
"""Completion time in seconds -> value, finite; a job that gets nothing is worth zero."""

_LARGEST_EXPONENT = 700.0  # beyond it, the exponential overflows


@dataclass(frozen=True)
class Combination:
    """Workers and servers of one job.

    Parameters
    ----------
    workers, servers
        Their numbers.
    demand
        What they need of each resource.
    seconds
        Completion time of the job.
    utility
        Its value.
    """

    workers: int
    servers: int
    demand: tuple[float, ...]
    seconds: float
    utility: float


@dataclass(frozen=True, eq=False)
class Combinations:
    """Combinations of one job, one per row.

    Parameters
    ----------
    workers, servers, seconds, utilities
        As of a `Combination`, shape (C,).
    demands
        Shape (C, R).
    """

    workers: Counts
    servers: Counts
    seconds: Table
    utilities: Table
    demands: Table

    def __len__(self) -> int:
        return len(self.workers)

    def __getitem__(self, row: int) -> Combination:
        return Combination(
            int(self.workers[row]),
            int(self.servers[row]),
            tuple(self.demands[row].tolist()),
            float(self.seconds[row]),
            float(self.utilities[row]),
        )

    def take(self, rows: npt.NDArray[np.bool_] | Counts) -> Combinations:
        """Return some of the combinations."""
        return Combinations(
            self.workers[rows], self.servers[rows], self.seconds[rows], self.utilities[rows], self.demands[rows]
        )

    def fastest(self) -> Combinations:
        """Return the combination with the shortest completion time, if there is any; of equal ones, the smallest."""
        order = np.lexsort((self.servers, self.workers, self.seconds))
        return self.take(order[:1])


@dataclass(frozen=True, eq=False)
class ResourceJob:
    """A job that can run on different numbers of workers and servers.

    Parameters
    ----------
    name
        Unique in its problem.
    worker, server
        What one of them needs of each resource.
    limit
        Most that the job may have of each resource.
    completion
        Its completion times.
    utility
        What a completion time is worth.

    Raises
    ------
    InvalidApp
        No name, negative demands or limits, or not one for each of the same resources.
    """

    name: str
    worker: tuple[float, ...]
    server: tuple[float, ...]
    limit: tuple[float, ...]
    completion: Completion
    utility: Utility

    def __post_init__(self) -> None:
        who = f"job {self.name!r}"
        if not self.name:
            raise InvalidApp("a job needs a name")
        for name in ("worker", "server", "limit"):
            values = getattr(self, name)
            if len(values) != len(self.limit) or not all(math.isfinite(value) and value >= 0 for value in values):
                raise InvalidApp(f"{who}: {name} must have zero or more of each resource, got {values!r}")

    @cached_property
    def combinations(self) -> Combinations:
        """All combinations within the job's limit, with 1 to `MOST_OF_EACH` workers and as many servers.

        Raises
        ------
        InvalidApp
            A completion time that is missing or not positive, or a utility that is not finite.
        """
        each = np.arange(1, MOST_OF_EACH + 1)
        workers, servers = (grid.ravel() for grid in np.meshgrid(each, each, indexing="ij"))
        demands = np.outer(workers, self.worker) + np.outer(servers, self.server)
        allowed = fits(demands, np.array(self.limit))
        workers, servers, demands = workers[allowed], servers[allowed], demands[allowed]
        seconds = np.asarray(self.completion(workers, servers), dtype=np.float64)
        if seconds.shape != workers.shape or not np.all(np.isfinite(seconds) & (seconds > 0)):
            raise InvalidApp(f"job {self.name!r}: needs one completion time for each combination, positive seconds")
        utilities = np.array([self.utility(value) for value in seconds.tolist()], dtype=np.float64)
        if not np.isfinite(utilities).all():
            raise InvalidApp(f"job {self.name!r}: the utility of a completion time must be finite")
        return Combinations(workers, servers, seconds, utilities, demands)


@dataclass(frozen=True, eq=False)
class ResourceProblem:
    """Jobs that share the resources of a cluster.

    Parameters
    ----------
    resources
        Names of the resources.
    capacity
        What there is of each.
    jobs
        The jobs.

    Raises
    ------
    InvalidApp
        Negative capacities, not one for each resource, jobs of other resources, or two jobs of the same name.
    """

    resources: tuple[str, ...]
    capacity: tuple[float, ...]
    jobs: tuple[ResourceJob, ...]

    def __post_init__(self) -> None:
        if len(self.capacity) != len(self.resources) or len(set(self.resources)) != len(self.resources):
            raise InvalidApp(f"resources need different names and one capacity each, got {self.resources!r}")
        if not all(math.isfinite(value) and value >= 0 for value in self.capacity):
            raise InvalidApp(f"capacities must be zero or more, got {self.capacity!r}")
        seen: set[str] = set()
        for job in self.jobs:
            if len(job.limit) != len(self.resources):
                raise InvalidApp(f"job {job.name!r}: needs one limit for each of {', '.join(self.resources)}")
            if job.name in seen:
                raise InvalidApp(f"two jobs are named {job.name!r}")
            seen.add(job.name)

    def used(self, chosen: Iterable[Combination]) -> tuple[float, ...]:
        """Return what combinations need together, of each resource."""
        used = np.zeros(len(self.resources))
        for combination in chosen:
            used += combination.demand
        return tuple(used.tolist())

    @property
    def load(self) -> float:
        """What all jobs may have together, as a multiple of the capacity, of the resource in which it is largest."""
        loads = (
            sum(job.limit[resource] for job in self.jobs) / there
            for resource, there in enumerate(self.capacity)
            if there > 0
        )
        return max(loads, default=0.0)


@dataclass(frozen=True)
class SigmoidUtility:
    """Value that falls around a critical time: top / (1 + exp(steepness × (seconds − critical))).

    OASiS (Bao et al., INFOCOM 2018) and SMD use it: a steepness of zero is a job that does not care about time, a large
    one a deadline.

    Parameters
    ----------
    top
        Value of an immediate completion, if the steepness is large.
    steepness
        How abruptly the value falls, per second.
    critical
        When half of `top` is left, seconds.

    Raises
    ------
    InvalidApp
        A value is negative or not finite.
    """

    top: float
    steepness: float
    critical: float

    def __post_init__(self) -> None:
        for name in ("top", "steepness", "critical"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidApp(f"sigmoid: {name} must be zero or more, got {getattr(self, name)!r}")

    def __call__(self, seconds: float) -> float:
        """Return the value of a completion after so many seconds."""
        exponent = self.steepness * (seconds - self.critical)
        return 0.0 if exponent > _LARGEST_EXPONENT else self.top / (1 + math.exp(exponent))
