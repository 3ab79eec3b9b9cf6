"""The result of a replay on a terminal: one table, and one sentence for who runs the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from freetrain_parsl.replay.page.dates import period
from freetrain_parsl.replay.page.what_if import factor_text, start_text
from freetrain_parsl.replay.page.wording import (
    best_first,
    count,
    dedicated_nodes,
    duration,
    is_attainable,
    milliseconds,
    percent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["heading", "result_table", "summary", "what_if_table"]

_LOSSES = {
    "loss_unused": "unused",
    "loss_split": "split",
    "loss_rescale": "rescale",
    "loss_preemption": "preempt",
    "loss_start": "start",
}
"""Key of a policy -> its column. What the oracle lacks is the same for all: it has its own row."""


def heading(result: Mapping[str, Any]) -> str:
    """Say what was replayed."""
    log, trainers = result["log"], result["trainers"]
    left_out = f"; malformed lines left out: {log['skipped']:,}" if log["skipped"] else ""
    cut = f"; jobs given fewer nodes than recorded: {log['clipped']:,}" if log["clipped"] else ""
    if log["masked"]:
        left_out += f"; outages left out: {duration(sum(seconds for _, seconds in log['masked']))}"
    if log["zero_length"]:
        cut += f"; jobs of less than a second: {log['zero_length']:,}"
    dates = f", {text}" if (text := period(log)) else ""
    return (
        f"{log['name']}: {log['nodes']:,} nodes, {duration(log['seconds'])}{dates}{left_out}{cut}\n"
        f"idle: {log['mean_idle']:,.1f} nodes on average, {log['median_idle']:,} in the median, "
        f"{log['events']:,} changes\n"
        f"trainings: {trainers['count']:,} ({trainers['spec']}), measured by {trainers['objective']}, "
        f"costs {result['cost']}"
    )


def result_table(result: Mapping[str, Any]) -> Table:
    """Draw the policies, and the oracle, in at most 80 columns."""
    policies = result["policies"]
    losses = {key: name for key, name in _LOSSES.items() if name != "start" or any(entry[key] for entry in policies)}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy")
    table.add_column("closings")
    table.add_column("U", justify="right")
    table.add_column("of\noracle", justify="right")
    for name in losses.values():
        table.add_column(f"lost:\n{name}", justify="right")
    table.add_column("median\nsolve", justify="right")
    for entry in policies:
        table.add_row(
            entry["policy"],
            entry["knowledge"],
            percent(entry["efficiency"]),
            percent(entry["oracle_ratio"]),
            *(percent(entry[key]) for key in losses),
            milliseconds(entry["solve_ms"]["median"]),
        )
    table.add_row("oracle", "", percent(policies[0]["oracle"]), percent(1.0), style="dim")
    return table


def what_if_table(result: Mapping[str, Any]) -> Table:
    """Draw U against what rescales (down) and starts (across) cost, of the policy that the summary is about."""
    figures = result["what_if"]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("U if rescales cost, and starts:")
    for seconds in figures["start_seconds"]:
        table.add_column(start_text(seconds), justify="right")
    for factor, shares in zip(figures["rescale_factors"], figures["efficiency"], strict=True):
        table.add_row(factor_text(factor), *map(percent, shares))
    return table


def summary(result: Mapping[str, Any]) -> str:
    """Say what the idle nodes would have been worth, with the best of the policies that can be had."""
    seconds = result["log"]["seconds"]
    best = best_first(result["policies"])[0]
    hours, cost, finished = best["node_hours"], best["idle_cost"], best["jct"]["finished"]
    told = "" if best["knowledge"] == "none" else f" (closings {best['knowledge']})"
    share = f" ({percent(hours['used'] / hours['idle'], 0)})" if hours["idle"] else ""
    used = f"{count(hours['used'])} of {count(hours['idle'])} idle node-hours{share}"
    worth = f", worth {count(cost['used'])} of {count(cost['idle'])}" if cost else ""
    ends = f"; {finished:,} of {result['trainers']['count']:,} trainings finished" if finished else ""
    dedicated = dedicated_nodes(result["dedicated_nodes"])
    bound = "" if is_attainable(best) else "Upper bound, for no plan knows closings as they will be: "
    begin = f"{bound}In {duration(seconds)}, training in the idle nodes with {best['policy']}{told} would have"
    if best["efficiency"] is None:
        return f"{begin} used {used}{worth}{ends}; {dedicated} would do nothing, so U has no meaning."
    return f"{begin} done {percent(best['efficiency'])} of what {dedicated} do, in {used}{worth}{ends}."
