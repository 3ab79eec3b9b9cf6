"""Simulation of one workload with several policies: what each knows and may choose, and figures for ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl import __version__
from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.extensions.goodput.baselines import OptimusPolicy, TiresiasPolicy
from freetrain_parsl.extensions.goodput.completion import CompletionTime, CompletionUtility, Urgency
from freetrain_parsl.extensions.goodput.ones import OnesPolicy
from freetrain_parsl.extensions.goodput.ones_published import OnesPublishedPolicy
from freetrain_parsl.extensions.replay.accounts import Bins
from freetrain_parsl.extensions.simulate.description import JobDescription, Sizing
from freetrain_parsl.extensions.simulate.simulation import DEFAULT_INTERVAL, simulate
from freetrain_parsl.planning.policies import (
    EqualSharePolicy,
    FirstComeFirstServedPolicy,
    MilpPolicy,
    Policy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.extensions.simulate.description import ClusterShape
    from freetrain_parsl.extensions.simulate.jobs.job import SimulatedJob
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest
    from freetrain_parsl.extensions.simulate.simulation import SimulatedRun

__all__ = ["COMPETITORS", "Competitor", "JobKnowledge", "compare_policies", "competitors", "figures"]


def figures(competitor: Competitor, run: SimulatedRun, cluster: ClusterShape) -> dict[str, Any]:
    """Return the figures of one policy; times in seconds unless their name says otherwise."""
    times = np.array([job.jct for job in run.jobs])
    solves = 1000 * np.array(run.solve_seconds or [0.0])
    training = sum(job.training_seconds for job in run.jobs)
    restarts = sum(job.restart_seconds for job in run.jobs)
    held = sum(use.gpus for use in run.use) * run.interval
    return {
        "policy": competitor.policy,
        "knowledge": competitor.knowledge.value,
        "mean_jct": float(times.mean()),
        "median_jct": float(np.median(times)),
        "p99_jct": float(np.percentile(times, 99)),
        "makespan": run.makespan,
        "restarts": sum(max(job.restarts, 0) for job in run.jobs),
        "solve_ms_median": float(np.median(solves)),
        "solve_ms_p99": float(np.percentile(solves, 99)),
        "refused": run.refused,
        "gpu_seconds": {
            "training": training,
            "restarts": restarts,
            "ended": held - training - restarts,
            "idle": len(run.use) * run.interval * cluster.gpus - held,
        },
        "wall_seconds": run.wall_seconds,
        "jobs": [{"job": job.name, "jct": job.jct} for job in run.jobs],
        "series": _series(run),
        "life": _life(max(run.jobs, key=lambda job: (job.restarts, job.name))),
    }


def _series(run: SimulatedRun) -> dict[str, Any]:
    """Return means over equal parts of the simulated time."""
    begin, end = run.use[0].time, run.use[-1].time + run.interval
    bins = Bins(begin, end)
    for use in run.use:
        for name, value in (("gpus", use.gpus), ("running", use.running), ("waiting", use.waiting)):
            bins.add_rate(name, use.time, use.time + run.interval, value)
    names = ("gpus", "running", "waiting")
    width = (end - begin) / len(bins.sums("gpus"))
    return {"seconds": end - begin, **{name: [float(value) / width for value in bins.sums(name)] for name in names}}


def _life(job: SimulatedJob) -> dict[str, Any]:
    """Return the phases of a job's life, times since its submission."""
    return {
        "job": job.name,
        "application": job.request.application.name,
        "seconds": job.jct,
        "phases": [{**phase._asdict(), "time": phase.time - job.request.time} for phase in job.phases],
    }


def compare_policies(
    name: str,
    requests: Sequence[JobRequest],
    cluster: ClusterShape,
    competitors: Sequence[Competitor],
    on_progress: Callable[[str, float], None] | None = None,
    *,
    interval: float = DEFAULT_INTERVAL,
) -> dict[str, Any]:
    """Simulate a workload, whose name is used in the figures, with each policy; see `simulate`.

    Returns
    -------
    dict
        The figures, as written by ``freetrain simulate --json``.
    """
    entries = []
    for competitor in competitors:
        doing = f"{competitor.policy}, knowing {competitor.knowledge.value}"

        def report(share: float, doing: str = doing) -> None:
            if on_progress is not None:
                on_progress(doing, share)

        run = simulate(requests, cluster, competitor.make(), competitor.description(cluster), report, interval=interval)
        entries.append(figures(competitor, run, cluster))
    return {
        "version": __version__,
        "workload": {
            "name": name,
            "jobs": len(requests),
            "seconds": requests[-1].time - requests[0].time,
        },
        "cluster": {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node, "gpus": cluster.gpus},
        "interval": interval,
        "policies": entries,
    }


class JobKnowledge(str, Enum):
    """What a policy knows about jobs."""

    NONE = "none"
    """Their curves, but not how long they will run."""
    AGE = "age"
    """Also the GPU-seconds that each has had."""
    CURVES = "curves"
    """The work left, but no curves: throughput and efficiency are measured while a job runs, which may have at most
    twice the GPUs that it has been measured on."""
    WORK = "work"
    """The curves and the work left."""


@dataclass(frozen=True)
class Competitor:
    """A policy as it competes; the other parameters are those of `JobDescription`."""

    policy: str
    knowledge: JobKnowledge
    sizing: Sizing
    make: Callable[[], Policy]
    placements: bool = False
    epochs: bool = False
    deadline_factor: float | None = None
    most_requested: int | None = None

    def description(self, cluster: ClusterShape) -> JobDescription:
        """Return what it knows of jobs."""
        return JobDescription(
            cluster,
            self.sizing,
            work_known=self.knowledge in {JobKnowledge.WORK, JobKnowledge.CURVES},
            curves_known=self.knowledge is not JobKnowledge.CURVES,
            placements_known=self.placements,
            epochs_known=self.epochs,
            deadline_factor=self.deadline_factor,
            most_requested=self.most_requested,
        )


_URGENCY = {
    JobKnowledge.NONE: Urgency.NONE,
    JobKnowledge.AGE: Urgency.SERVICE,
    JobKnowledge.CURVES: Urgency.WORK,
    JobKnowledge.WORK: Urgency.WORK,
}


def _milp(knowledge: JobKnowledge) -> Competitor:
    objective = CompletionTime.knowing(_URGENCY[knowledge])
    return Competitor(MilpPolicy.name, knowledge, Sizing.BOTH, lambda: MilpPolicy(objective))


def _ones(knowledge: JobKnowledge) -> Competitor:
    objective = CompletionTime.knowing(_URGENCY[knowledge])
    return Competitor(OnesPolicy.name, knowledge, Sizing.BOTH, lambda: OnesPolicy(objective), placements=True)


_FIXED = {
    made.policy: made
    for made in (
        Competitor("fcfs", JobKnowledge.NONE, Sizing.RIGID, FirstComeFirstServedPolicy),
        Competitor("tiresias", JobKnowledge.AGE, Sizing.RIGID, TiresiasPolicy),
        Competitor("optimus", JobKnowledge.WORK, Sizing.GPUS, OptimusPolicy),
        Competitor("equal-share", JobKnowledge.NONE, Sizing.BOTH, EqualSharePolicy),
        Competitor(
            "smd",
            JobKnowledge.WORK,
            Sizing.BOTH,
            lambda: MilpPolicy(CompletionUtility()),
            deadline_factor=2.0,
        ),
        Competitor(
            OnesPublishedPolicy.name,
            JobKnowledge.WORK,
            Sizing.BOTH,
            OnesPublishedPolicy,
            epochs=True,
            most_requested=4,
        ),
    )
}
_CHOOSING: dict[str, Callable[[JobKnowledge], Competitor]] = {MilpPolicy.name: _milp, OnesPolicy.name: _ones}

COMPETITORS = (*_FIXED, *_CHOOSING)
"""Names of the policies. All but ``milp`` and ``ones`` have a knowledge of their own."""


def competitors(policies: Sequence[str], knowledge: Sequence[JobKnowledge]) -> list[Competitor]:
    """Return the named policies, with each knowledge if they use it.

    Raises
    ------
    InvalidSettings
        A name is unknown.
    """
    made: list[Competitor] = []
    for name in policies:
        if name in _FIXED:
            made.append(_FIXED[name])
        elif name in _CHOOSING:
            made += map(_CHOOSING[name], knowledge)
        else:
            raise InvalidSettings(
                f"unknown policy {name!r}{did_you_mean(name, COMPETITORS)}; available: {', '.join(sorted(COMPETITORS))}"
            )
    return made
