"""The result of a replay, at one site or several, on a terminal: tables and a one-sentence summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from freetrain_parsl.extensions.pages.dates import period
from freetrain_parsl.extensions.replay.page.policies import factor_text, start_text
from freetrain_parsl.extensions.replay.page.wording import (
    NO_FIGURE,
    best_first,
    count,
    dedicated_nodes,
    duration,
    is_attainable,
    milliseconds,
    most_finished,
    percent,
    ratio,
    way_name,
    ways,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "heading",
    "kinds_table",
    "plain_table",
    "result_table",
    "site_heading",
    "site_summary",
    "site_table",
    "summary",
    "sweep_summary",
    "sweep_table",
    "what_if_table",
]

_LOSSES = {
    "loss_unused": "unused",
    "loss_split": "split",
    "loss_rescale": "rescale",
    "loss_preemption": "preempt",
    "loss_start": "start",
}
"""Key of a policy -> its column. The loss of the oracle is the same for all policies and has its own row."""


def plain_table(texts: Iterable[str], figures: Iterable[str]) -> Table:
    """Make a table without lines, with columns of texts and then of figures."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table


def heading(result: Mapping[str, Any]) -> str:
    """Describe the replayed log and training jobs."""
    log, trainers = result["log"], result["trainers"]
    left_out = f"; malformed lines skipped: {log['skipped']:,}" if log["skipped"] else ""
    cut = f"; jobs given fewer nodes than recorded: {log['clipped']:,}" if log["clipped"] else ""
    if log["masked"]:
        left_out += f"; outages removed: {duration(sum(seconds for _, seconds in log['masked']))}"
    if log["zero_length"]:
        cut += f"; jobs of less than a second: {log['zero_length']:,}"
    dates = f", {text}" if (text := period(log)) else ""
    terms = f", costs {result['cost']}"
    if "fusion" in result:
        terms += f", fusion {result['fusion']['name']}"
    if result["curves"] != "known":
        terms += f", curves {result['curves']}"
    if result["blocks_start_in"] is not None:
        terms += f", in blocks that train after {result['blocks_start_in']:g} s"
    nodes = "nodes"
    if (units := result.get("accelerators")) is not None:
        way = "shared by training jobs" if units["shared"] else "each for one training job"
        nodes = f"nodes of {units['per_node']} accelerators, {way}"
    return (
        f"{log['name']}: {log['nodes']:,} {nodes}, {duration(log['seconds'])}{dates}{left_out}{cut}\n"
        f"idle: {log['mean_idle']:,.1f} nodes on average, {log['median_idle']:,} in the median, "
        f"{log['events']:,} changes\n"
        f"training jobs: {trainers['count']:,} ({trainers['spec']}), measured by {trainers['objective']}{terms}"
    )


def result_table(result: Mapping[str, Any]) -> Table:
    """Build the table of the policies and the oracle, at most 80 columns wide."""
    policies = result["policies"]
    losses = {key: name for key, name in _LOSSES.items() if name != "start" or any(entry[key] for entry in policies)}
    lost = [f"lost:\n{name}" for name in losses.values()]
    table = plain_table(("policy", "closings"), ("U", "of\noracle", *lost, "median\nsolve"))
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


def kinds_table(result: Mapping[str, Any]) -> Table:
    """Build the table of the node-hours that each policy used of each kind of nodes."""
    hours = {kind: nodes * result["log"]["seconds"] / 3600 for kind, nodes in result["idle_by_kind"].items()}
    kinds = [f"{kind}, of\n{count(idle)} idle" for kind, idle in hours.items()]
    table = plain_table(("node-hours\nused", "closings"), kinds)
    for entry in result["policies"]:
        used = [entry["used_by_kind"].get(kind, 0.0) for kind in hours]
        cells = [
            f"{count(some)} ({percent(some / idle, 0)})" if idle else count(some)
            for some, idle in zip(used, hours.values(), strict=True)
        ]
        table.add_row(entry["policy"], entry["knowledge"], *cells)
    return table


def sweep_table(result: Mapping[str, Any]) -> Table:
    """Build the table of sweeps, fused and one by one with each policy, at most 80 columns wide."""
    table = plain_table(
        ("policy", "closings", "members\ntrain"),
        ("finished", "all\nwork", "node-hours\nused", "finished per\nnode-hour", "mean time\nto finish"),
    )
    for entry in result["policies"]:
        for way, sweep, times in ways(entry):
            table.add_row(
                entry["policy"],
                entry["knowledge"],
                way,
                f"{sweep['finished']:,}",
                f"{sweep['work']:,.1f}",
                count(sweep["node_hours"]),
                NO_FIGURE if (rate := sweep["finished_per_node_hour"]) is None else f"{rate:.3g}",
                duration(times["mean"]),
            )
    return table


def sweep_summary(result: Mapping[str, Any]) -> str:
    """Summarise what fusion gains with the policy that finishes most."""
    best = most_finished(result["policies"])[0]
    sweep, hours = best["sweep"], best["node_hours"]
    closings = "" if best["knowledge"] == "none" else f" (closings {best['knowledge']})"
    alone = best.get("one_by_one")
    way = "one by one" if alone is None else f"fused as {result['fusion']['name']}"
    against = "" if alone is None else f", against {alone['finished']:,} one by one"
    cost = best["idle_cost"]
    worth = f", worth {count(cost['used'])} of {count(cost['idle'])}" if cost else ""
    return (
        f"In {duration(result['log']['seconds'])}, {sweep['finished']:,} of {sweep['members']:,} members would have "
        f"finished in the idle nodes, {way} with {best['policy']}{closings}{against}, in {count(hours['used'])} of "
        f"{count(hours['idle'])} idle node-hours{worth}."
    )


def what_if_table(result: Mapping[str, Any]) -> Table:
    """Build the table of U by the costs of rescales (down) and starts (across), for the policy of the summary."""
    figures = result["what_if"]
    table = plain_table(("U by cost of rescales, starts:",), map(start_text, figures["start_seconds"]))
    for factor, shares in zip(figures["rescale_factors"], figures["efficiency"], strict=True):
        table.add_row(factor_text(factor), *map(percent, shares))
    return table


def summary(result: Mapping[str, Any]) -> str:
    """Summarise the value of the idle nodes with the best attainable policy."""
    seconds = result["log"]["seconds"]
    best = best_first(result["policies"])[0]
    hours, cost, finished = best["node_hours"], best["idle_cost"], best["jct"]["finished"]
    closings = "" if best["knowledge"] == "none" else f" (closings {best['knowledge']})"
    share = f" ({percent(hours['used'] / hours['idle'], 0)})" if hours["idle"] else ""
    used = f"{count(hours['used'])} of {count(hours['idle'])} idle node-hours{share}"
    if (each := best.get("accelerator_hours")) is not None:
        used += f" and {count(each['used'])} of {count(each['idle'])} accelerator-hours"
    worth = f", worth {count(cost['used'])} of {count(cost['idle'])}" if cost else ""
    ends = f"; {finished:,} of {result['trainers']['count']:,} training jobs finished" if finished else ""
    dedicated = dedicated_nodes(result["dedicated_nodes"])
    bound = "" if is_attainable(best) else "Upper bound, because no plan knows future closings: "
    begin = f"{bound}In {duration(seconds)}, training in the idle nodes with {best['policy']}{closings} would have"
    if best["efficiency"] is None:
        return f"{begin} used {used}{worth}{ends}; {dedicated} would train nothing, so U is undefined."
    return f"{begin} done {percent(best['efficiency'])} of what {dedicated} do, in {used}{worth}{ends}."


def site_heading(result: Mapping[str, Any]) -> str:
    """Describe the sites, the training jobs and the moves."""
    lines = []
    for site in result["sites"]:
        dates = f", {text}" if (text := period(site)) else ""
        lines.append(
            f"{site['site']}: {site['name']}, {site['nodes']:,} nodes{dates}; idle: {site['mean_idle']:,.1f} on average"
        )
    trainers = result["trainers"]
    lines.append(
        f"training jobs: {trainers['count']:,} ({trainers['spec']}), measured by {trainers['objective']}, "
        f"costs {result['cost']}, policy {result['policy']}"
    )
    lines.append(f"a look every {duration(result['look'])}, state of {result['state_bytes'] / 1e6:,.0f} MB")
    return "\n".join(lines)


def site_table(result: Mapping[str, Any]) -> Table:
    """Build the table of the ways of using the sites, at most 80 columns wide."""
    best = max(way["value"] for way in result["ways"] if way["way"] == "alone")
    names = ("value", "U", "node-hours\nused", "useful\nnode-hours", "finished", "moves", "MB\nmoved")
    table = plain_table(("sites",), names)
    for way in result["ways"]:
        moves = way["moves"]
        table.add_row(
            way_name(way),
            ratio(way["value"] / best if best else None),
            percent(way["efficiency"]),
            count(way["node_hours"]["used"]),
            count(way["useful_node_seconds"] / 3600),
            f"{way['jct']['finished']:,}",
            f"{moves['count']:,}" if way["way"] == "together" else "",
            f"{moves['bytes'] / 1e6:,.0f}" if way["way"] == "together" else "",
            style="dim" if way["way"] == "one machine" else None,
        )
    return table


def site_summary(result: Mapping[str, Any]) -> str:
    """Summarise what the sites are worth together."""
    gain = result["gain"]
    (together,) = (way for way in result["ways"] if way["way"] == "together")
    moves = together["moves"]
    took = f", which took {duration(moves['seconds'])} in all" if moves["count"] else ""
    audit = "no sample was lost or processed twice"
    if together["samples_lost"] or together["duplicate_samples"]:
        audit = f"{together['samples_lost']:,.0f} samples lost, {together['duplicate_samples']:,.0f} processed twice"
    return (
        f"In {duration(result['log']['seconds'])}, the sites together would have done {ratio(gain['over_best_alone'])} "
        f"what {result['best_alone']} alone does, {ratio(gain['over_apart'])} what they do without moves, and "
        f"{percent(gain['of_one_machine'])} of what one machine with the nodes of all would do; that is "
        f"{percent(together['efficiency'])} of what {dedicated_nodes(result['dedicated_nodes'])} do. "
        f"{moves['count']:,} move{'s' * (moves['count'] != 1)}{took}; {audit}."
    )
