"""Policies for several resources: problem -> decision; and why a job got nothing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.solvers.multiple_choice import NOTHING, fits, maximise_choices
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from freetrain_parsl.extensions.resources.demands import Combination, Combinations, ResourceJob, ResourceProblem

__all__ = [
    "RESOURCE_POLICIES",
    "EqualServersPolicy",
    "KnapsackPolicy",
    "MarginalGainPolicy",
    "ResourceDecision",
    "ResourcePolicy",
    "SmdPolicy",
    "SmdTwoStagePolicy",
    "reasons_for_nothing",
]


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


class SmdPolicy(KnapsackPolicy):
    """Chooses among all combinations of all jobs: SMD's problem, solved as a whole.

    A job gets fewer workers or servers than it may have if others make more of the resources.
    """

    name: ClassVar[str] = "smd"

    def consider(self, job: ResourceJob) -> Combinations:
        """Consider every combination."""
        return job.combinations


class SmdTwoStagePolicy(KnapsackPolicy):
    """SMD's decomposition (Yu et al., INFOCOM 2021), for comparison.

    The inner problem of each job is its fastest combination within its own limit; the outer one, a 0/1 knapsack,
    admits jobs with these. The paper solves the inner problem by linear programmes on a grid of ratios and rounds the
    result. Here it is enumerated, which is at least as good.
    """

    name: ClassVar[str] = "smd-two-stage"

    def consider(self, job: ResourceJob) -> Combinations:
        """Consider only the fastest combination."""
        return job.combinations.fastest()


class EqualServersPolicy(KnapsackPolicy):
    """Like `SmdTwoStagePolicy`, but with as many servers as workers (SMD's baseline ESW), for comparison."""

    name: ClassVar[str] = "esw"

    def consider(self, job: ResourceJob) -> Combinations:
        """Consider only the fastest combination of equal numbers."""
        combinations = job.combinations
        return combinations.take(combinations.workers == combinations.servers).fastest()


class MarginalGainPolicy(ResourcePolicy):
    """Optimus' greedy rule (Peng et al., EuroSys 2018), for comparison.

    Jobs get one worker and one server each, in their order. Then the job gets another worker or server whose
    completion time falls the most per share of the resource that the addition needs most of (the dominant one). It does
    not look at utilities.
    """

    name: ClassVar[str] = "optimus"

    def allocate(self, problem: ResourceProblem) -> ResourceDecision:
        """Decide; see `ResourcePolicy.allocate`."""
        started = time.perf_counter()
        considered = {job.name: job.combinations for job in problem.jobs}
        capacity = np.array(problem.capacity)
        left = capacity.copy()
        growing: dict[str, _Growth] = {}
        for name, combinations in considered.items():
            if len(combinations) and fits(combinations.demands[0], left):  # of one worker and one server
                growing[name] = _Growth(combinations, capacity)
                left = left - combinations.demands[0]
        while True:
            steps = [(*step, name) for name, growth in growing.items() if (step := growth.best(left))]
            if not steps:
                break
            _, row, name = max(steps, key=lambda step: step[0])
            left = left - growing[name].move(row)
        chosen = {name: growth.combinations[growth.row] for name, growth in growing.items()}
        bound = sum(float(one.utilities.max(initial=0.0)) for one in considered.values())
        return ResourceDecision(chosen, considered, bound, time.perf_counter() - started)


class _Growth:
    """A job that has `row` of its combinations and may get one more worker or server."""

    def __init__(self, combinations: Combinations, capacity: npt.NDArray[np.float64]) -> None:
        self.combinations, self.row = combinations, 0
        self._capacity = capacity
        pairs = zip(combinations.workers.tolist(), combinations.servers.tolist(), strict=True)
        self._rows = {pair: row for row, pair in enumerate(pairs)}
        self._steps = list(self._next())

    def best(self, left: npt.NDArray[np.float64]) -> tuple[float, int] | None:
        """Return the gain and the row of the better addition that fits, if there is one that gains."""
        return max(((gain, row) for gain, row, needs in self._steps if fits(needs, left)), default=None)

    def move(self, row: int) -> npt.NDArray[np.float64]:
        """Go to a row; return what it needs in addition."""
        [needs] = [needs for _, to, needs in self._steps if to == row]
        self.row = row
        self._steps = list(self._next())
        return needs

    def _next(self) -> Iterator[tuple[float, int, npt.NDArray[np.float64]]]:
        """Yield gain, row and additional demand of one more worker and of one more server, if they gain."""
        here, table = self.combinations[self.row], self.combinations
        for pair in ((here.workers + 1, here.servers), (here.workers, here.servers + 1)):
            row = self._rows.get(pair)
            if row is None:
                continue
            needs = table.demands[row] - table.demands[self.row]
            saved = here.seconds - float(table.seconds[row])
            with np.errstate(divide="ignore", invalid="ignore"):
                share = float(np.nanmax(needs / self._capacity, initial=0.0))
            if saved > 0:
                yield saved / share if share else np.inf, row, needs


RESOURCE_POLICIES: dict[str, type[ResourcePolicy]] = {
    policy.name: policy for policy in (SmdPolicy, SmdTwoStagePolicy, EqualServersPolicy, MarginalGainPolicy)
}
"""Name -> class; all can be made without arguments."""


def reasons_for_nothing(problem: ResourceProblem, decision: ResourceDecision) -> dict[str, str]:
    """Return one line for each job that a decision gives nothing."""
    capacity = np.array(problem.capacity)
    left = capacity - problem.used(decision.chosen.values())
    reasons: dict[str, str] = {}
    for job in problem.jobs:
        if job.name in decision.chosen:
            continue
        considered = decision.considered[job.name]
        useful = considered.take(considered.utilities > 0)
        if not len(considered):
            reasons[job.name] = "one worker and one server exceed its own limit"
        elif not len(useful):
            hours = considered.seconds.min() / 3600
            reasons[job.name] = f"worth nothing so late: it needs {hours:.3g} h at least"
        elif not fits(useful.demands, capacity).any():
            reasons[job.name] = _shortage(problem, useful, capacity, "the cluster has")
        elif not fits(useful.demands, left).any():
            reasons[job.name] = _shortage(problem, useful, left, "the other jobs leave")
        else:
            reasons[job.name] = "it would gain less than the permitted gap"
    return reasons


def _shortage(
    problem: ResourceProblem, combinations: Combinations, available: npt.NDArray[np.float64], whose: str
) -> str:
    """Name the combination that comes closest to fitting, and the resource that it lacks most of."""
    capacity = np.array(problem.capacity)
    lacking = (combinations.demands - available) / np.where(capacity > 0, capacity, 1.0)
    row = int(np.argmin(lacking.max(axis=1)))
    resource = int(np.argmax(lacking[row]))
    nearest = combinations[row]
    pair = f"{_count(nearest.workers, 'worker')} and {_count(nearest.servers, 'server')}"
    needed, there = nearest.demand[resource], max(float(available[resource]), 0.0)
    return f"{pair} need {needed:g} {problem.resources[resource]}, {whose} {there:g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
