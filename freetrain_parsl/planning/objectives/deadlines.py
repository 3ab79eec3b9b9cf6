"""Which deadlines can be met together, and what that asks of the next seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Job", "rates_now"]

Table = npt.NDArray[np.float64]

_DONE = 1e-9  # of the work: less than this is rounding


@dataclass(frozen=True, eq=False)
class Job:
    """Work with a deadline.

    Parameters
    ----------
    name
        Of the trainer.
    work
        Samples, more than zero.
    left
        Seconds of training until the deadline, more than zero.
    rates
        Samples per second on 0, 1, …, N nodes, shape (N + 1,); zero where a count is not allowed.
    priority
        Weight of its deadline.
    """

    name: str
    work: float
    left: float
    rates: Table
    priority: float = 1.0

    @property
    def demand(self) -> float:
        """The least node-seconds that its work takes; infinity if it cannot run."""
        best = float((self.rates[1:] / np.arange(1, len(self.rates))).max(initial=0.0))
        return self.work / best if best > 0 else np.inf


def rates_now(jobs: Sequence[Job], nodes: int) -> dict[str, float]:
    """Find jobs whose deadlines can be met together, and the rate that each needs until the first of them.

    If not all can be met, jobs are admitted in order of their deadlines, and whenever that is too much, the one
    with the largest demand for its priority is left out (Moore, Management Science 15, 1968: for one machine this
    misses the fewest). Rates may be zero: the work fits behind other deadlines.

    Parameters
    ----------
    jobs
        Of different names.
    nodes
        Size of the pool; it is taken to stay so.

    Returns
    -------
    dict
        Name of each job that is admitted -> samples per second, zero or more.
    """
    ordered = sorted(jobs, key=lambda job: (job.left, job.name))
    plan = _plan(ordered, nodes)
    if plan is not None:
        return plan
    admitted: list[Job] = []
    plan = {}
    for job in ordered:
        candidates = [*admitted, job]
        extended = _plan(candidates, nodes)
        if extended is None:
            heaviest = max(candidates, key=lambda one: (one.demand / one.priority, one.name))
            candidates.remove(heaviest)
            # Demands are estimates where curves are not linear: the rest may not fit still, and the job is left out.
            extended = _plan(candidates, nodes)
        if extended is not None:
            admitted, plan = candidates, extended
    return plan


def _plan(ordered: Sequence[Job], nodes: int) -> dict[str, float] | None:
    """Give every job what it needs side by side with the others if that fits, or one after the other."""
    least = [int(np.argmax(job.rates * job.left >= job.work)) for job in ordered]
    if all(least) and sum(least) <= nodes:
        return {job.name: float(job.rates[count]) for job, count in zip(ordered, least, strict=True)}
    return _latest_plan(ordered, nodes)


def _latest_plan(ordered: Sequence[Job], nodes: int) -> dict[str, float] | None:
    """Give every job the latest nodes it can do with: its rate until the first deadline. None if one does not fit.

    Time is cut at the deadlines. The job with the last deadline takes what it needs from the last stretches, then
    the one before, and so on: earliest deadline first, seen from the end.
    """
    ends = sorted({job.left for job in ordered})
    lengths = np.diff([0.0, *ends])
    free = [nodes] * len(ends)
    plan: dict[str, float] = {}
    for job in reversed(ordered):
        work, first = job.work, 0.0
        for stretch in range(ends.index(job.left), -1, -1):
            done = job.rates[: free[stretch] + 1] * lengths[stretch]
            count = int(np.argmax(done >= work)) or int(np.argmax(done))
            free[stretch] -= count
            work -= float(done[count])
            if stretch == 0:
                first = float(job.rates[count])
            if work <= _DONE * job.work:
                break
        else:
            return None
        plan[job.name] = first
    return plan
