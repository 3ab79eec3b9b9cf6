"""Comparison of the policies: efficiency and losses of each, and the best one with other costs of changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages import charts
from freetrain_parsl.extensions.pages.charts import BarPart, Series
from freetrain_parsl.extensions.replay.page.wording import NO_FIGURE, count, duration, losses_met, milliseconds, percent
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.markup import element, row, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from xml.etree.ElementTree import Element

    from freetrain_parsl.extensions.pages.dates import TimeAxis

__all__ = ["comparison", "factor_text", "start_text", "what_if_table"]

_LINE_COLOURS = (4, 0, 2, 3, 5, 1, 7, 8)  # the trainings' colours that stand out as thin lines


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
            "Trainings",
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
            f"Efficiency of {policies[0]['label']}. Down: the cost of growing and shrinking relative to the trainings' "
            "own costs. Across: the cost of each start.",
            class_="note",
        ),
        table("What if", ("Rescaling", *map(start_text, figures["start_seconds"])), rows),
    ]
