"""The figures of a run on a cluster with accounting: idle and used node time, and delays of other jobs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.report.projection.run import RunState

__all__ = ["run_figures"]


def run_figures(
    run: RunState,
    *,
    usage: Mapping[str, float],
    delays: Sequence[Mapping[str, Any]],
    main_jobs: int,
    results: Mapping[str, Mapping[str, Any]],
    delay_tolerance: float,
    slots_per_node: int = 1,
) -> dict[str, Any]:
    """Summarize a run; the keys are those of ``freetrain demo --json``.

    Parameters
    ----------
    run
        The run's state, from its journal.
    usage, delays
        The cluster's accounting: ``ClusterClient.usage`` and ``ClusterClient.delays``.
    main_jobs
        Number of jobs submitted to the main queue.
    results
        Training name -> return value of its function.
    delay_tolerance
        A main job counts as delayed if it started more than this many seconds later than in the same queue without
        our jobs.
    slots_per_node
        Converts slot-seconds to node-seconds.

    Returns
    -------
    figures
        All times in seconds, all areas in node-seconds.
    """
    trainings = run.trainings.values()
    late = [delay["delay"] for delay in delays]
    solves_ms = [1000 * seconds for seconds in run.solve_seconds]
    useful = sum(training.progress.get("slot_seconds", 0.0) for training in trainings) / slots_per_node
    used = usage["preemptible_node_seconds"]
    return {
        "trainings": len(run.trainings),
        "trainings_completed": run.completed,
        "fragments": len(run.fragments),
        "rescales": sum(training.rescales for training in trainings),
        "resumes_from_checkpoint": sum(training.resumes for training in trainings),
        "fragments_lost": sum(fragment.failure for fragment in run.fragments),
        "checkpoints": len(run.checkpoints),
        "blocks": run.blocks_requested,
        "elapsed_seconds": usage["elapsed"],
        "idle_node_seconds_offered": usage["idle_node_seconds"],
        "idle_node_seconds_used": used,
        "useful_node_seconds": useful,
        "useful_share_of_used": useful / used if used else 0.0,
        "samples": sum(training.progress.get("samples", 0) for training in trainings),
        "samples_lost": sum(training.progress.get("samples_lost", 0) for training in trainings),
        "duplicate_samples": sum(training.progress.get("duplicate_samples", 0) for training in trainings),
        "main_jobs": main_jobs,
        "main_jobs_delayed": sum(delay > delay_tolerance for delay in late),
        "main_job_delay_seconds_max": max(late, default=0.0),
        "main_job_delay_tolerance_seconds": delay_tolerance,
        "final_metrics": {name: dict(metrics) for name, metrics in sorted(results.items())},
        "solver": {
            "median_ms": statistics.median(solves_ms) if solves_ms else 0.0,
            "max_ms": max(solves_ms, default=0.0),
            "solves": len(solves_ms),
            "proven": run.solves_proven,
        },
    }
