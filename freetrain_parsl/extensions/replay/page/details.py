"""The section of each policy: use of the nodes, progress of the trainings, decision times."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages import charts
from freetrain_parsl.extensions.pages.charts import Series
from freetrain_parsl.extensions.replay.page.wording import count, duration, milliseconds, percent, samples
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.markup import element, row, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

    from freetrain_parsl.extensions.pages.dates import TimeAxis

__all__ = ["node_use", "policy_by_policy", "use_figures"]

_TRAINERS_DRAWN = 10  # the maximum number of distinguishable colours
_TRAINERS_LISTED = 50
_STEPS_DRAWN = 200  # of idle nodes over time: finer ones are narrower than a phone's pixels


def policy_by_policy(policies: Sequence[Mapping[str, Any]], axis: TimeAxis) -> list[Element]:
    """Build a collapsible section per policy; that of the best one is open."""
    return [
        element("h2", "Details"),
        *(
            element(
                "details",
                element(
                    "summary",
                    element("strong", entry["label"]),
                    element("span", f": {percent(entry['efficiency'])}"),
                ),
                node_use(entry, axis),
                *_progress(entry),
                *_solve_times(entry),
                open=None if i else "",
            )
            for i, entry in enumerate(policies)
        ),
    ]


def node_use(entry: Mapping[str, Any], axis: TimeAxis, user: str = "training") -> Element:
    """Draw the idle nodes of a policy over time, and what used them."""
    series = entry["series"]
    factor = math.ceil(len(series["idle"]) / _STEPS_DRAWN)
    idle = _coarser(series["idle"], factor)
    used = {name: _coarser(values, factor) for name, values in series["used"].items()}
    totals = {name: sum(values) for name, values in used.items()}
    largest = sorted(totals, key=lambda name: -totals[name])[: _TRAINERS_DRAWN + (len(used) == _TRAINERS_DRAWN + 1)]
    drawn = [name for name in used if name in largest]
    layers = [Series(name, colour_of(i), used[name]) for i, name in enumerate(drawn)]
    others = [used[name] for name in used if name not in largest]
    if others:
        rest = [sum(column) for column in zip(*others, strict=True)]
        layers.append(Series(f"{len(others):,} others", "var(--others)", rest))
    taken = [sum(column) for column in zip(*used.values(), strict=True)] if used else [0.0] * len(idle)
    unused = [max(total - part, 0.0) for total, part in zip(idle, taken, strict=True)]
    layers.append(Series("unused", "var(--unused)", unused))
    hours = entry["node_hours"]
    users = f"{len(used):,} {user}{'s' * (len(used) != 1)}"
    summary = f"{count(hours['used'])} of {count(hours['idle'])} idle node-hours were used by {users}."
    caption = f"{summary} Each step is the mean of {duration(factor * series['bin_seconds'])}."
    title = "Idle nodes and their use"
    drawn_seconds = len(idle) * factor * series["bin_seconds"]
    return charts.figure(
        title,
        caption,
        charts.stacked_areas(title, summary, layers, axis=replace(axis, seconds=drawn_seconds)),
        charts.legend([(layer.name, layer.colour) for layer in layers]),
    )


def use_figures(log: Mapping[str, Any], entry: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the main figures of a policy's use of the idle nodes: name, value and note."""
    hours, cost, times, solve = entry["node_hours"], entry["idle_cost"], entry["jct"], entry["solve_ms"]
    share = hours["used"] / hours["idle"] if hours["idle"] else None
    figures = [
        ("Node-hours used", count(hours["used"]), f"of {count(hours['idle'])} idle ({percent(share, 0)})"),
        ("Median idle nodes", count(log["median_idle"]), "weighted by time"),
    ]
    if times["finished"] and "sweep" not in entry:
        figures.append(("Trainings finished", count(times["finished"]), f"on average after {duration(times['mean'])}"))
    if cost is not None:
        price = f"of {count(cost['idle'])} idle, at {cost['price_per_node_hour']:g} a node-hour"
        figures.append(("Value of nodes used", count(cost["used"]), price))
    if entry["solves"]:
        under = f"median; 99 % under {milliseconds(solve['p99'])}"
        figures.append(("Decision time", milliseconds(solve["median"]), under))
    return figures


def _coarser(values: Sequence[float], factor: int) -> list[float]:
    """Replace every `factor` values by their mean."""
    return [statistics.fmean(values[i : i + factor]) for i in range(0, len(values), factor)]


def _progress(entry: Mapping[str, Any]) -> list[Element]:
    trainers = sorted(entry["trainers"], key=lambda trainer: -trainer["node_hours"])
    most = max((trainer["node_hours"] for trainer in trainers), default=0.0)
    endless = all(trainer["work"] is None for trainer in trainers)
    head = [
        "Training",
        *([] if endless else ["Progress", "Time to finish"]),
        "Samples",
        "Node-hours",
        "Rescales",
        "Preemptions",
    ]
    rows = []
    for trainer in trainers[:_TRAINERS_LISTED]:
        finished = trainer["finished"]
        work = trainer["work"]
        share = None if work is None else min(trainer["samples"] / work, 1.0) if work else 1.0
        progress: list[str | Element] = (
            []
            if endless
            else [
                element(
                    "td", "endless" if share is None else percent(share, 0), None if share is None else _track(share)
                ),
                duration(None if finished is None else finished - trainer["submitted"]),
            ]
        )
        rows.append(
            row(
                trainer["name"],
                *progress,
                samples(trainer["samples"]),
                element("td", count(trainer["node_hours"]), _track(trainer["node_hours"] / most if most else 0.0)),
                count(trainer["rescales"]),
                count(trainer["preemptions"]),
            )
        )
    notes = []
    if endless:
        notes.append("They are endless: they train as long as there are nodes.")
    if len(trainers) > len(rows):
        notes.append(f"These {len(rows)} used the most; the other {len(trainers) - len(rows):,} are in the JSON file.")
    return [
        element("h3", "Progress of the trainings"),
        element("p", " ".join(notes), class_="note"),
        table("Trainings", head, rows),
    ]


def _solve_times(entry: Mapping[str, Any]) -> list[Element]:
    histogram, solve = entry["solve_histogram"], entry["solve_ms"]
    title = "Decision times"
    if not sum(histogram["counts"]):
        return []
    summary = (
        f"{count(entry['solves'])} decisions: median {milliseconds(solve['median'])}, 99 % within "
        f"{milliseconds(solve['p99'])}, longest {milliseconds(solve['max'])}, "
        f"{percent(entry['proven_optimal_share'])} proven optimal."
    )
    edges = [milliseconds(edge) for edge in histogram["edges_ms"]]
    picture = charts.columns(title, summary, histogram["counts"], edges, colour="var(--solid)")
    return [charts.figure(title, summary, picture)]


def _track(share: float) -> Element:
    return element("span", element("span", style=f"width:{100 * share:.0f}%"), class_="track", aria_hidden="true")
