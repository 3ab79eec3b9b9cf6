"""Why a job got nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.planning.solvers.multiple_choice import fits

if TYPE_CHECKING:
    import numpy.typing as npt

    from freetrain_parsl.extensions.resources.demands import Combinations, ResourceProblem
    from freetrain_parsl.extensions.resources.policies import ResourceDecision

__all__ = ["reasons_for_nothing"]


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
