"""Simulation of one workload with several policies, and its figures as ``freetrain simulate --json`` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl import __version__
from freetrain_parsl.extensions.replay.series import Bins
from freetrain_parsl.extensions.simulate.simulation import DEFAULT_INTERVAL, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.extensions.simulate.competitors import Competitor
    from freetrain_parsl.extensions.simulate.jobs.cluster import ClusterShape
    from freetrain_parsl.extensions.simulate.jobs.job import SimulatedJob
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest
    from freetrain_parsl.extensions.simulate.simulation import SimulatedRun

__all__ = ["compare_policies", "figures"]


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
    """Simulate a workload with each policy.

    Parameters
    ----------
    name
        The workload's name in the figures.
    requests, cluster
        As in `freetrain_parsl.extensions.simulate.simulation.simulate`.
    competitors
        The policies.
    on_progress
        Called from time to time with what is being done, and the share that is done.
    interval
        Seconds between two decisions.

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
