"""The page of sweeps: how many members finished, fused and one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages import charts
from freetrain_parsl.extensions.pages.charts import Series
from freetrain_parsl.extensions.pages.dates import period
from freetrain_parsl.extensions.replay.page.policies import node_use, use_figures
from freetrain_parsl.extensions.replay.page.wording import NO_FIGURE, count, duration, ways
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.markup import cards, element, row, table, terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

    from freetrain_parsl.extensions.pages.dates import TimeAxis

__all__ = ["sweep_parts"]

_TERMS = {
    "Fused": "Members of a sweep train as arrays, one on each node, which share the throughput of the fusion curve "
    "equally. Arrays are formed, enlarged, split and merged when nodes open or close and when members end.",
    "One by one": "The same replay with one member on each node.",
    "All work": "The number of members whose work would have been the same: finished ones, and the shares of others.",
    "Node-hour": "One node for one hour.",
}


def sweep_parts(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]], axis: TimeAxis) -> list[Element]:
    """Build the page's parts, from the heading to the terms, for policies with labels, the best first."""
    best = policies[0]
    return [
        *_opening(result, best),
        element("h2", "Fused and one by one"),
        _finished(result, policies, axis),
        _table(result, policies),
        element("h2", "Details"),
        node_use(best, axis, user="sweep"),
        *terms(_TERMS),
    ]


def _opening(result: Mapping[str, Any], best: Mapping[str, Any]) -> list[Element]:
    log, sweep, alone = result["log"], best["sweep"], best.get("one_by_one")
    span, dates = duration(log["seconds"]), period(log)
    against = "" if alone is None else f", against {alone['finished']:,} one by one"
    way = "one by one" if alone is None else f"fused as {result['fusion']['name']}"
    return [
        element("p", f"FreeTrain replay of {log['name']}" + (f", {dates}" if dates else ""), class_="eyebrow"),
        element("h1", f"Your idle nodes: {log['mean_idle']:,.1f} of {log['nodes']:,} on average"),
        element(
            "p",
            "Training in them would have finished ",
            element("strong", f"{sweep['finished']:,}"),
            f" of {sweep['members']:,} members of sweeps in {span}, {way}{against} ({result['trainers']['spec']}), "
            f"planned by {best['label']}.",
            class_="lede",
        ),
        *(element("p", note, class_="warning") for note in result["notes"]),
        cards(
            [
                ("Members finished", count(sweep["finished"]), f"of {count(sweep['members'])}"),
                ("Finished per node-hour", _rate(sweep), f"all work: that of {count(sweep['work'])} members"),
                *use_figures(log, best),
            ]
        ),
    ]


def _finished(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]], axis: TimeAxis) -> Element:
    series = []
    for number, entry in enumerate(policies):
        keys = ("finished", "finished_one_by_one")
        for key, (way, sweep, _) in zip(keys, ways(entry), strict=False):
            shares = [finished / sweep["members"] for finished in entry["series"][key]]
            name = f"{entry['label']}, {way}: {count(sweep['finished'])}"
            series.append(Series(name, colour_of(number), shares, dashed=way == "one by one"))
    title = "Members finished over time"
    summary = "; ".join(one.name for one in series)
    return charts.figure(
        title,
        f"Share of all members; fusion {result['fusion']['name']}, one by one dashed.",
        charts.lines(title, summary, series, axis=axis, low=0.0),
        charts.legend([(one.name, one.colour) for one in series]),
    )


def _table(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> Element:
    columns = [(f"{entry['label']}, {way}", sweep, times) for entry in policies for way, sweep, times in ways(entry)]
    rows = [
        ("Members finished", [count(sweep["finished"]) for _, sweep, _ in columns]),
        ("All work", [count(sweep["work"]) for _, sweep, _ in columns]),
        ("Node-hours used", [count(sweep["node_hours"]) for _, sweep, _ in columns]),
        ("Finished per node-hour", [_rate(sweep) for _, sweep, _ in columns]),
        ("Mean time to finish", [duration(times["mean"]) for _, _, times in columns]),
        ("95 % within", [duration(times["p95"]) for _, _, times in columns]),
    ]
    body = [row(name, *texts) for name, texts in rows]
    return table(f"Fusion {result['fusion']['name']} and one by one", ("", *(name for name, _, _ in columns)), body)


def _rate(sweep: Mapping[str, Any]) -> str:
    rate = sweep["finished_per_node_hour"]
    return NO_FIGURE if rate is None else f"{rate:.3g}"
