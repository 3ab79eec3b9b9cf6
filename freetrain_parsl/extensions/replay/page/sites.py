"""The page of several sites: what their holes are worth together and alone, and what moved between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages import charts
from freetrain_parsl.extensions.pages.charts import Series
from freetrain_parsl.extensions.replay.page.wording import (
    NO_FIGURE,
    count,
    dedicated_nodes,
    duration,
    percent,
    ratio,
    way_name,
)
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.markup import cards, element, row, table, terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

    from freetrain_parsl.extensions.pages.dates import TimeAxis

__all__ = ["site_parts"]

_MEGABYTE = 1e6
_TERMS = {
    "Alone": "All training jobs at that site, whose planner has its idle nodes only.",
    "Without moves": "Each training job stays at the site where it first had nodes.",
    "With moves": "Training jobs are moved when that is expected to gain more until the next look than it costs: the "
    "transfer of the state, and a start.",
    "As one machine": "All idle nodes in one pool, where training jobs span sites and nothing is transferred: a "
    "reference, "
    "as no network is that fast.",
    "Value": "Samples processed, in units of the objective, less the cost of changes.",
    "Efficiency (U)": "Value divided by that of the same training jobs on dedicated nodes: as many as were idle on "
    "average "
    "at all sites together.",
    "Useful node-hours": "Node-hours held by training jobs, less those that changes of their nodes have cost.",
    "Node-hour": "One node for one hour.",
}


def site_parts(result: Mapping[str, Any], axis: TimeAxis) -> list[Element]:
    """Build the page's parts, from the heading to the terms, over the time that all logs cover."""
    return [
        *_opening(result),
        element("h2", "Together and alone"),
        _progress(result, axis),
        _table(result),
        element("h2", "Moves"),
        *_moves(result),
        *terms(_TERMS),
    ]


def _together(result: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(way for way in result["ways"] if way["way"] == "together")
    return found


def _opening(result: Mapping[str, Any]) -> list[Element]:
    sites, gain, together = result["sites"], result["gain"], _together(result)
    idle = " and ".join(f"{site['mean_idle']:,.1f} of {site['nodes']:,} at {site['site']}" for site in sites)
    return [
        element("p", f"FreeTrain replay of {', '.join(site['site'] for site in sites)}", class_="eyebrow"),
        element("h1", f"Your idle nodes: {idle}"),
        element(
            "p",
            "Training jobs that follow the holes between sites would have done ",
            element("strong", ratio(gain["over_best_alone"])),
            f" what {result['best_alone']} alone does in the same {duration(result['log']['seconds'])}, and "
            f"{ratio(gain['over_apart'])} what they do without moves: {result['trainers']['count']:,} training jobs "
            f"({result['trainers']['spec']}), planned by {result['policy']}.",
            class_="lede",
        ),
        *(element("p", note, class_="warning") for note in result["notes"]),
        cards(_figures(result, together)),
    ]


def _figures(result: Mapping[str, Any], together: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    moves, gain = together["moves"], result["gain"]
    dedicated = dedicated_nodes(result["dedicated_nodes"])
    lost = together["samples_lost"] + together["duplicate_samples"]
    figures = [
        ("Efficiency", percent(together["efficiency"]), f"of the same training jobs on {dedicated}"),
        ("Of one machine", percent(gain["of_one_machine"]), "with the nodes of all sites in one pool"),
        (
            "Useful node-hours",
            count(together["useful_node_seconds"] / 3600),
            f"{ratio(gain['useful_node_seconds'])} of {result['best_alone']} alone",
        ),
        ("Moves", count(moves["count"]), f"{count(moves['bytes'] / _MEGABYTE)} MB in {duration(moves['seconds'])}"),
        ("Samples lost or repeated", count(lost), "when training jobs moved"),
    ]
    if (cost := together["idle_cost"]) is not None:
        figures.append(("Value of nodes used", count(cost["used"]), f"at {cost['price_per_node_hour']:g} a node-hour"))
    return figures


def _progress(result: Mapping[str, Any], axis: TimeAxis) -> Element:
    series = [
        Series(
            f"{way_name(way)}: {percent(way['efficiency'])}",
            colour_of(number),
            way["series"]["efficiency"],
            dashed=way["way"] == "one machine",
        )
        for number, way in enumerate(result["ways"])
    ]
    title = "Efficiency over time"
    return charts.figure(
        title,
        "From the beginning up to each time, relative to dedicated nodes.",
        charts.lines(title, "; ".join(one.name for one in series), series, axis=axis, low=0.0),
        charts.legend([(one.name, one.colour) for one in series]),
    )


def _table(result: Mapping[str, Any]) -> Element:
    ways: Sequence[Mapping[str, Any]] = result["ways"]
    best = max(way["value"] for way in ways if way["way"] == "alone")
    rows = [
        ("Value", [ratio(way["value"] / best if best else None) for way in ways]),
        ("Efficiency U", [percent(way["efficiency"]) for way in ways]),
        ("Idle node-hours", [count(way["node_hours"]["idle"]) for way in ways]),
        ("Node-hours used", [count(way["node_hours"]["used"]) for way in ways]),
        ("Useful node-hours", [count(way["useful_node_seconds"] / 3600) for way in ways]),
        ("Lost to rescaling", [percent(way["losses"]["rescale"]) for way in ways]),
        ("Lost to preemption", [percent(way["losses"]["preemption"]) for way in ways]),
        ("Lost to starts", [percent(way["losses"]["start"]) for way in ways]),
        ("Finished", [count(way["jct"]["finished"]) for way in ways]),
        ("Mean time to finish", [duration(way["jct"]["mean"]) for way in ways]),
    ]
    body = [row(name, *texts) for name, texts in rows if set(texts) != {NO_FIGURE}]
    return table("Together and alone", ("", *map(way_name, ways)), body)


def _moves(result: Mapping[str, Any]) -> list[Element]:
    links = _together(result)["moves"]["links"]
    rates = {(one["from"], one["to"]): one for one in result["transfers"]}
    text = (
        f"A decision every {duration(result['look'])}. The state of a training job has "
        f"{count(result['state_bytes'] / _MEGABYTE)} MB."
    )
    if not links:
        return [element("p", f"{text} No training job was worth a move.")]
    names = ("From", "To", "MB/s", "Moves", "MB", "Paused for")
    body = []
    for link in links:
        rate = rates[link["from"], link["to"]]
        cells = (
            link["to"],
            count(rate["bytes_per_second"] / _MEGABYTE),
            count(link["count"]),
            count(link["bytes"] / _MEGABYTE),
            duration(link["seconds"]),
        )
        body.append(row(link["from"], *cells))
    return [element("p", text), table("Moves", names, body)]
