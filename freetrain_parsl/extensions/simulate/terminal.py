"""The result of a simulation on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from freetrain_parsl.extensions.replay.page.wording import count, duration, milliseconds, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["heading", "result_table"]


def heading(result: Mapping[str, Any]) -> str:
    """Describe the workload and the cluster."""
    workload, cluster = result["workload"], result["cluster"]
    return (
        f"{workload['name']}: {workload['jobs']:,} jobs submitted within {duration(workload['seconds'])}, on "
        f"{cluster['nodes']:,} nodes of {cluster['gpus_per_node']} GPUs"
    )


def result_table(result: Mapping[str, Any]) -> Table:
    """Build the table of the policies, at most 80 columns wide."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("policy", "knows"):
        table.add_column(name)
    for name in (
        "mean\ntime",
        "median\ntime",
        "99 %\nwithin",
        "all\nafter",
        "restarts",
        "GPUs\nin use",
        "median\nsolve",
    ):
        table.add_column(name, justify="right")
    for entry in result["policies"]:
        seconds = entry["gpu_seconds"]
        table.add_row(
            entry["policy"],
            entry["knowledge"],
            duration(entry["mean_jct"]),
            duration(entry["median_jct"]),
            duration(entry["p99_jct"]),
            duration(entry["makespan"]),
            count(entry["restarts"]),
            percent(1 - seconds["idle"] / sum(seconds.values()), 0),
            milliseconds(entry["solve_ms_median"]),
        )
    return table
