"""The policies of a replay: their comparison, the best one with other costs of changes, and a section for each."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages import charts
from freetrain_parsl.extensions.pages.charts import BarPart, Series
from freetrain_parsl.extensions.replay.page.wording import (
    NO_FIGURE,
    count,
    duration,
    losses_met,
    milliseconds,
    percent,
    samples,
)
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.markup import element, row, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from xml.etree.ElementTree import Element

    from freetrain_parsl.extensions.pages.dates import TimeAxis

__all__ = ["comparison", "factor_text", "node_use", "policy_by_policy", "start_text", "use_figures", "what_if_table"]

_LINE_COLOURS = (4, 0, 2, 3, 5, 1, 7, 8)  # the training jobs' colours that stand out as thin lines


def comparison(policies: Sequence[Mapping[str, Any]], axis: TimeAxis) -> list[Element]:
    """Compare the policies, in this order, over the time of a log."""
    losses = losses_met(policies)
    labels = [entry["label"] for entry in policies]
    done = [[BarPart("done", "var(--solid)", entry["efficiency"] or 0.0)] for entry in policies]
    lost = [[BarPart(loss.name, loss.colour, entry[key] or 0.0) for key, loss in losses.items()] for entry in policies]
    most = max(map(_length, lost))
    several = len(policies) > 1
    made = [element("h2", "Comparison of policies" if several else "Use of the idle nodes")]
    if shared := policies[0]["shared"]:
        made.append(element("p", f"{'All with' if several else 'With'} {shared}.", class_="note"))
    made.append(
        charts.figure(
            "Efficiency and losses",
            "The whole bar is the work of the same number of dedicated nodes.",
            _bars(labels, [mine + missing for mine, missing in zip(done, lost, strict=True)], whole=1.0),
            charts.legend([("done", "var(--solid)"), *((loss.name, loss.colour) for loss in losses.values())]),
        )
    )
    if most:
        text = f"Enlarged: the widest bar is {percent(most)}."
        made.append(charts.figure("Losses only", text, _bars(labels, lost, whole=most)))
    return [*made, _efficiency_over_time(policies, axis), _table(policies)]


def _length(parts: Sequence[BarPart]) -> float:
    return sum(max(part.value, 0.0) for part in parts)


def _bars(labels: Sequence[str], rows: Sequence[Sequence[BarPart]], *, whole: float) -> Element:
    # A negative loss is a gain, which makes the sum of the other parts larger than the whole.
    whole = max(whole, *map(_length, rows))
    cells: list[Element] = []
    for label, parts in zip(labels, rows, strict=True):
        cells += [element("div", label, class_="name"), charts.share_bar(label, parts, whole=whole)]
    return element("div", *cells, class_="bars")


def _efficiency_over_time(policies: Sequence[Mapping[str, Any]], axis: TimeAxis) -> Element:
    series = [Series("oracle", "var(--text)", policies[0]["series"]["oracle"], dashed=True)]
    series += [
        Series(
            entry["label"],
            colour_of(_LINE_COLOURS[i % len(_LINE_COLOURS)]),
            entry["series"]["efficiency"],
        )
        for i, entry in enumerate(policies)
    ]
    summary = "; ".join(f"{one.name} ends at {percent(_last(one.values))}" for one in series)
    names = [(f"{one.name}: {percent(_last(one.values))}", one.colour) for one in series]
    title = "Efficiency over time"
    return charts.figure(
        title,
        "Cumulative up to that time. The beginning, based on little data, may be outside the range.",
        charts.lines(title, summary, series, axis=axis),
        charts.legend(names),
    )


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _table(policies: Sequence[Mapping[str, Any]]) -> Element:
    groups: list[tuple[str, list[tuple[str, Callable[[Mapping[str, Any]], str]]]]] = [
        (
            "Result",
            [
                ("Efficiency U", lambda e: percent(e["efficiency"])),
                ("Oracle", lambda e: percent(e["oracle"])),
                ("Share of the oracle", lambda e: percent(e["oracle_ratio"])),
            ],
        ),
        ("Lost to", [(loss.name, _loss_cell(key)) for key, loss in losses_met(policies).items()]),
        (
            "Training jobs",
            [
                ("Finished", lambda e: count(e["jct"]["finished"])),
                ("Mean time to finish", lambda e: duration(e["jct"]["mean"])),
                ("Median", lambda e: duration(e["jct"]["median"])),
                ("95 % within", lambda e: duration(e["jct"]["p95"])),
                ("Node-hours used", lambda e: count(e["node_hours"]["used"])),
                *((f"of {kind} nodes", _kind_cell(kind)) for kind in _kinds(policies)),
            ],
        ),
        (
            "Planner",
            [
                ("Events", lambda e: count(e["events"])),
                ("Decisions", lambda e: count(e["solves"])),
                ("Median decision", lambda e: milliseconds(e["solve_ms"]["median"])),
                ("99 % within", lambda e: milliseconds(e["solve_ms"]["p99"])),
                ("Longest", lambda e: milliseconds(e["solve_ms"]["max"])),
                ("Proven optimal", lambda e: percent(e["proven_optimal_share"])),
                ("Plans rejected", lambda e: count(e["refused"])),
                ("Replay took", lambda e: duration(e["wall_seconds"])),
            ],
        ),
    ]
    bodies = []
    for group, rows in groups:
        cells = [(name, [cell(entry) for entry in policies]) for name, cell in rows]
        shown = [row(name, *texts) for name, texts in cells if set(texts) != {NO_FIGURE}]
        title = element("th", group, scope="rowgroup", colspan=len(policies) + 1)
        if shown:
            bodies.append([element("tr", title), *shown])
    return table("Policies compared", ("", *(e["label"] for e in policies)), *bodies)


def _loss_cell(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda entry: percent(entry[key])


def _kinds(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds of nodes that some policy used, in order of their names."""
    return sorted({kind for entry in policies for kind in entry["used_by_kind"]})


def _kind_cell(kind: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda entry: count(entry["used_by_kind"].get(kind, 0.0))


def factor_text(factor: float) -> str:
    """Format the factor on the cost of rescales."""
    return "as given" if factor == 1 else f"{factor:g} times"


def start_text(seconds: float) -> str:
    """Format the cost of a start."""
    return f"{seconds:g}\N{NO-BREAK SPACE}s" if seconds else "free"


def what_if_table(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> list[Element]:
    """Show U of the first policy by the costs of rescales and starts; nothing if it was not computed."""
    figures = result.get("what_if")
    if figures is None:
        return []
    rows = [
        row(factor_text(factor), *map(percent, shares))
        for factor, shares in zip(figures["rescale_factors"], figures["efficiency"], strict=True)
    ]
    return [
        element("h2", "What if changes cost less or more"),
        element(
            "p",
            f"Efficiency of {policies[0]['label']}. Down: the cost of growing and shrinking relative to the "
            "training jobs' "
            "own costs. Across: the cost of each start.",
            class_="note",
        ),
        table("What if", ("Rescaling", *map(start_text, figures["start_seconds"])), rows),
    ]


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
        figures.append(
            ("Training jobs finished", count(times["finished"]), f"on average after {duration(times['mean'])}")
        )
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
        element("h3", "Progress of the training jobs"),
        element("p", " ".join(notes), class_="note"),
        table("Training jobs", head, rows),
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
