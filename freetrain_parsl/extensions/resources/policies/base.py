"""Interface of policies for several resources: problem -> decision; and those that solve a knapsack."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.solvers.multiple_choice import NOTHING, maximise_choices
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.extensions.resources.demands import Combination, Combinations, ResourceJob, ResourceProblem

__all__ = ["KnapsackPolicy", "ResourceDecision", "ResourcePolicy"]


@dataclass(frozen=True, eq=False)
class ResourceDecision:
    """A policy's decision.

    Parameters
    ----------
    chosen
        Job -> its workers and servers, in the order of the problem; jobs that get nothing are absent.
    considered
        Job -> the combinations that the policy chose from.
    bound
        Upper bound on the total utility of any choice of these.
    solve_seconds
        Wall time of the decision.
    """

    chosen: Mapping[str, Combination]
    considered: Mapping[str, Combinations]
    bound: float
    solve_seconds: float

    @property
    def utility(self) -> float:
        """Total utility of the jobs."""
        return sum(combination.utility for combination in self.chosen.values())

    @property
    def gap(self) -> float:
        """Distance of the utility from its bound, relative to the bound."""
        return max(0.0, 1 - self.utility / self.bound) if self.bound > 0 else 0.0


class ResourcePolicy(ABC):
    """Chooses a combination of workers and servers for each job, or nothing."""

    name: ClassVar[str]

    @abstractmethod
    def allocate(self, problem: ResourceProblem) -> ResourceDecision:
        """Decide; the chosen combinations fit the capacity together."""


class KnapsackPolicy(ResourcePolicy):
    """Maximises the total utility over those combinations that the concrete policy considers.

    Deterministic, unless the time limit is reached.

    Parameters
    ----------
    time_limit
        After this time the best choices so far are used; the decision's ``bound`` shows how much better others could
        be.
    gap
        Stop when no choice is better by more than this, relative.

    Raises
    ------
    InvalidSettings
        The time limit is not a positive `timedelta`, or the gap not in [0, 1).
    """

    def __init__(self, *, time_limit: timedelta = timedelta(seconds=10), gap: float = 1e-4) -> None:
        check_duration(f"policy {self.name!r}: time_limit", time_limit)
        if not 0 <= gap < 1:
            raise InvalidSettings(f"policy {self.name!r}: gap must lie in [0, 1), got {gap!r}")
        self._time_limit = time_limit.total_seconds()
        self._gap = gap

    @abstractmethod
    def consider(self, job: ResourceJob) -> Combinations:
        """Return the combinations to choose from; see `ResourceJob.combinations`."""

    def allocate(self, problem: ResourceProblem) -> ResourceDecision:
        """Decide; see `ResourcePolicy.allocate`."""
        started = time.perf_counter()
        considered = {job.name: self.consider(job) for job in problem.jobs}
        left = self._time_limit - (time.perf_counter() - started)
        solution = maximise_choices(
            [combinations.utilities for combinations in considered.values()],
            [combinations.demands for combinations in considered.values()],
            np.array(problem.capacity),
            time_limit=max(left, 0.0),
            gap=self._gap,
        )
        chosen = {
            name: combinations[choice]
            for (name, combinations), choice in zip(considered.items(), solution.choices.tolist(), strict=True)
            if choice != NOTHING
        }
        return ResourceDecision(chosen, considered, solution.bound, time.perf_counter() - started)
