"""Determine which deadlines can be met together, and the rates that they require now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DueWork", "rates_now"]

Table = npt.NDArray[np.float64]

_DONE = 1e-9  # of the work: less than this is a rounding error


@dataclass(frozen=True, eq=False)
class DueWork:
    """A trainer's work with a deadline: a job, as scheduling theory calls it.

    Parameters
    ----------
    name
        Name of the trainer.
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
        """The minimum node-seconds that its work takes; infinity if it cannot run."""
        best = float((self.rates[1:] / np.arange(1, len(self.rates))).max(initial=0.0))
        return self.work / best if best > 0 else np.inf


def rates_now(jobs: Sequence[DueWork], nodes: int) -> dict[str, float]:
    """Find jobs whose deadlines can be met together, and the rate that each needs until the first deadline.

    If not all deadlines can be met, jobs are admitted in order of their deadlines, and whenever they do not fit, the
    one with the largest demand relative to its priority is rejected (Moore, Management Science 15, 1968: on one machine
    this misses the fewest deadlines). Rates may be zero if the work fits after other deadlines.

    Parameters
    ----------
    jobs
        With distinct names.
    nodes
        Size of the pool, which is assumed to be constant.

    Returns
    -------
    dict
        Name of each admitted job -> samples per second, zero or more.
    """
    ordered = sorted(jobs, key=lambda job: (job.left, job.name))
    plan = _plan(ordered, nodes)
    if plan is not None:
        return plan
    admitted: list[DueWork] = []
    plan = {}
    for job in ordered:
        candidates = [*admitted, job]
        extended = _plan(candidates, nodes)
        if extended is None:
            heaviest = max(candidates, key=lambda one: (one.demand / one.priority, one.name))
            candidates.remove(heaviest)
            # Demands are estimates if curves are not linear: the rest may still not fit, and the job is rejected.
            extended = _plan(candidates, nodes)
        if extended is not None:
            admitted, plan = candidates, extended
    return plan


def _plan(ordered: Sequence[DueWork], nodes: int) -> dict[str, float] | None:
    """Schedule all jobs concurrently if that fits, otherwise one after the other."""
    least = [int(np.argmax(job.rates * job.left >= job.work)) for job in ordered]
    if all(least) and sum(least) <= nodes:
        return {job.name: float(job.rates[count]) for job, count in zip(ordered, least, strict=True)}
    return _latest_plan(ordered, nodes)


def _latest_plan(ordered: Sequence[DueWork], nodes: int) -> dict[str, float] | None:
    """Schedule every job as late as possible; return the rates until the first deadline, ``None`` if one does not fit.

    Time is divided at the deadlines. The job with the last deadline takes the nodes that it needs from the last
    intervals, then the one before, and so on: earliest deadline first, backwards in time.
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
