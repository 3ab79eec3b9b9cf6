"""Simulation of one workload with several policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl import __version__
from freetrain_parsl.extensions.simulate.figures import figures
from freetrain_parsl.extensions.simulate.simulation import DEFAULT_INTERVAL, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.extensions.simulate.competitors import Competitor
    from freetrain_parsl.extensions.simulate.jobs.cluster import ClusterShape
    from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest

__all__ = ["compare_policies"]


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
