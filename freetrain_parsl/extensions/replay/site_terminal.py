"""The result of a replay of several sites on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from freetrain_parsl.extensions.pages.dates import period
from freetrain_parsl.extensions.replay.page.wording import count, dedicated_nodes, duration, percent, ratio, way_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["site_heading", "site_summary", "site_table"]


def site_heading(result: Mapping[str, Any]) -> str:
    """Describe the sites, the trainings and the moves."""
    lines = []
    for site in result["sites"]:
        dates = f", {text}" if (text := period(site)) else ""
        lines.append(
            f"{site['site']}: {site['name']}, {site['nodes']:,} nodes{dates}; idle: {site['mean_idle']:,.1f} on average"
        )
    trainers = result["trainers"]
    lines.append(
        f"trainings: {trainers['count']:,} ({trainers['spec']}), measured by {trainers['objective']}, "
        f"costs {result['cost']}, policy {result['policy']}"
    )
    lines.append(f"a look every {duration(result['look'])}, state of {result['state_bytes'] / 1e6:,.0f} MB")
    return "\n".join(lines)


def site_table(result: Mapping[str, Any]) -> Table:
    """Build the table of the ways of using the sites, at most 80 columns wide."""
    best = max(way["value"] for way in result["ways"] if way["way"] == "alone")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("sites")
    for name in ("value", "U", "node-hours\nused", "useful\nnode-hours", "finished", "moves", "MB\nmoved"):
        table.add_column(name, justify="right")
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
