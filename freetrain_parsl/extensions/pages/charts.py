"""Charts without scripts: inline SVG shapes that scale with the page, and HTML text of constant size.

Text in an SVG that is scaled to a phone's width shrinks with it, down to 4 px. Therefore only shapes are SVG; axis
labels and legends are HTML, positioned in per cent of the plot.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from freetrain_parsl.report.markup import element

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from xml.etree.ElementTree import Element

    from freetrain_parsl.extensions.pages.dates import TimeAxis

__all__ = ["BarPart", "Series", "columns", "figure", "legend", "lines", "share_bar", "stacked_areas"]

_HEIGHT = 500  # units of the viewBox; paths hold integers, which keeps a page of 3,000 bins small


class Series(NamedTuple):
    """A named series with one value per time bin; ``None`` if not available yet."""

    name: str
    colour: str
    values: Sequence[float | None]
    dashed: bool = False


class BarPart(NamedTuple):
    """One part of a bar."""

    name: str
    colour: str
    value: float


def stacked_areas(title: str, summary: str, layers: Sequence[Series], *, axis: TimeAxis) -> Element:
    """Draw `layers` of equal length, the first at the bottom, as steps over time; ``None`` counts as 0.

    Title and summary (its main result) are for screen readers.
    """
    sums: list[list[float]] = []
    below = [0.0] * len(layers[0].values)
    for layer in layers:
        below = [total + max(value or 0.0, 0.0) for total, value in zip(below, layer.values, strict=True)]
        sums.append(below)
    ticks = _ticks(max(max(below, default=0.0), 1.0))
    # Highest first, each down to the baseline: the next one covers the rest, so no lower edges are needed.
    shapes = [
        element("path", element("title", layer.name), d=_steps(total, ticks[-1]), fill=layer.colour)
        for layer, total in reversed(list(zip(layers, sums, strict=True)))
    ]
    labels = [(tick / ticks[-1], f"{tick:,g}") for tick in ticks]
    return _plot(title, summary, shapes, width=len(below), y_labels=labels, x_labels=axis.labels())


def lines(title: str, summary: str, series: Sequence[Series], *, axis: TimeAxis, low: float | None = None) -> Element:
    """Draw shares (1 is 100 %) over time as lines.

    The axis range is that of the last three quarters of the values, or from `low` to their largest.
    """
    settled = [value for one in series for value in one.values[len(one.values) // 4 :] if value is not None]
    low = math.floor(10 * min(settled, default=0.0)) / 10 if low is None else low
    high = max(math.ceil(10 * max(settled, default=1.0)) / 10, low + 0.1)
    ticks = [low + tick for tick in _ticks(high - low)]
    low, high = ticks[0], ticks[-1]
    width = max((len(one.values) for one in series), default=1)
    shapes = [
        element(
            "path",
            element("title", one.name),
            d=_line(one.values, low, high),
            fill="none",
            stroke=one.colour,
            class_="line dashed" if one.dashed else "line",
        )
        for one in series
    ]
    labels = [((tick - low) / (high - low), f"{100 * tick:.0f} %") for tick in ticks]
    return _plot(title, summary, shapes, width=width, y_labels=labels, x_labels=axis.labels())


def columns(title: str, summary: str, heights: Sequence[float], edges: Sequence[str], *, colour: str) -> Element:
    """Draw a histogram with bins of equal width; `edges` are the labels of their ``len(heights) + 1`` edges."""
    ticks = _ticks(max(max(heights, default=0.0), 1.0))
    shapes = [
        element(
            "rect",
            element("title", f"{edges[i]} to {edges[i + 1]}: {height:,g}"),
            x=i + 0.06,
            width=0.88,
            y=_down(height, ticks[-1]),
            height=_HEIGHT - _down(height, ticks[-1]),
            fill=colour,
        )
        for i, height in enumerate(heights)
    ]
    every = math.ceil(len(edges) / 6)
    x_labels = [(i / len(heights), edges[i]) for i in range(0, len(edges), every)]
    y_labels = [(tick / ticks[-1], f"{tick:,g}") for tick in ticks]
    return _plot(title, summary, shapes, width=len(heights), y_labels=y_labels, x_labels=x_labels)


def share_bar(title: str, parts: Sequence[BarPart], *, whole: float) -> Element:
    """Draw a horizontal bar of `parts`, of total width `whole`; negative parts have no width."""
    shapes = []
    left = 0.0
    for part in parts:
        width = 1000 * max(part.value, 0.0) / whole
        label = element("title", f"{part.name}: {100 * part.value:.1f} %")
        shapes.append(element("rect", label, x=f"{left:.2f}", width=f"{width:.2f}", height=1, fill=part.colour))
        left += width
    summary = "; ".join(f"{part.name} {100 * part.value:.1f} %" for part in parts)
    return _svg(title, summary, shapes, width=1000, height=1, class_="bar")


def figure(title: str, text: str, *parts: Element) -> Element:
    """Put a title and a line of explanation above a chart and its legend."""
    return element("figure", element("figcaption", element("strong", title), text), *parts)


def legend(entries: Iterable[tuple[str, str]]) -> Element:
    """List (name, colour) pairs."""
    items = [
        element("li", element("span", class_="swatch", style=f"background:{colour}", aria_hidden="true"), name)
        for name, colour in entries
    ]
    return element("ul", *items, class_="legend")


def _plot(
    title: str,
    summary: str,
    shapes: Sequence[Element],
    *,
    width: int,
    y_labels: Sequence[tuple[float, str]],
    x_labels: Sequence[tuple[float, str]],
) -> Element:
    rows = [_HEIGHT - round(_HEIGHT * share) for share, _ in y_labels]
    grid = element("path", d="".join(f"M0 {row}h{width}" for row in rows), class_="grid")
    down = [element("span", text, style=f"bottom:{100 * share:.1f}%") for share, text in y_labels]
    # On a phone every other label is hidden; the last one must not overflow on the right.
    across = [
        element(
            "span",
            text,
            style=f"left:{100 * share:.1f}%" if share < 0.97 else "right:0",
            class_="minor" if i % 2 else "end" if share >= 0.97 else "begin" if share < 0.03 else None,
        )
        for i, (share, text) in enumerate(x_labels)
    ]
    return element(
        "div",
        element("div", *down, class_="y", aria_hidden="true"),
        _svg(title, summary, [*shapes, grid], width=width, height=_HEIGHT),
        element("div", *across, class_="x", aria_hidden="true"),
        class_="plot",
    )


def _svg(
    title: str, summary: str, shapes: Sequence[Element], *, width: int, height: int, class_: str | None = None
) -> Element:
    return element(
        "svg",
        element("title", title),
        element("desc", summary),
        *shapes,
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
        role="img",
        class_=class_,
    )


def _down(value: float, top: float) -> int:
    return _HEIGHT - round(_HEIGHT * value / top)


def _steps(values: Sequence[float], top: float) -> str:
    """Outline bins of width 1 down to the baseline."""
    rows = [_down(value, top) for value in values]
    path = [f"M0 {_HEIGHT}"]
    at, run = _HEIGHT, 0
    for row in rows:
        if row != at:
            path.append(f"h{run}v{row - at}" if run else f"v{row - at}")
            at, run = row, 0
        run += 1
    return "".join([*path, f"h{run}V{_HEIGHT}z"])


def _line(values: Sequence[float | None], low: float, high: float) -> str:
    path = []
    pen = "M"
    for i, value in enumerate(values, start=1):
        if value is None:
            pen = "M"
            continue
        inside = min(max(value, low - 1), high + 1)  # the plot clips the rest
        path.append(f"{pen}{i} {_HEIGHT - round(_HEIGHT * (inside - low) / (high - low))}")
        pen = "L"
    return "".join(path)


def _ticks(top: float) -> list[float]:
    """Return at most six ticks from 0 to the first at or above `top`, in steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(top))
    step = next(size for size in (power / 5, power / 2, power, 2 * power) if top <= 5 * size * (1 + 1e-9))
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]
