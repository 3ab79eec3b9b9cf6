"""The curves of a run as a picture: loss and what training jobs log, against steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.output import write_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["draw_curves"]

_MOST_PLOTS = 6  # names, the loss first
_MOST_NAMED = 12  # training jobs in the legend


def draw_curves(
    curves: Sequence[Mapping[str, Any]], trainings: Sequence[str], path: Path, *, title: str
) -> tuple[str, ...]:
    """Draw curves to a PNG or SVG file, one plot for each name.

    Parameters
    ----------
    curves
        ``training`` (its place in `trainings`), ``name``, ``step`` and ``value``; see `RunView.since`. At least one.
    trainings
        Their names.
    path
        Output file; the suffix selects the format.
    title
        Title of the picture.

    Returns
    -------
    names
        The names that have a plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = sorted({curve["name"] for curve in curves}, key=lambda name: (name != "loss", name))[:_MOST_PLOTS]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(13 if columns > 1 else 7, 0.6 + 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    plots = {}
    for place, name in enumerate(names, start=1):
        plots[name] = figure.add_subplot(rows, columns, place)
        plots[name].set_title(name)
        plots[name].set_xlabel("step")
        plots[name].grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for curve in sorted(curves, key=lambda curve: curve["training"]):
        if (axes := plots.get(curve["name"])) is None:
            continue
        marker = "." if len(curve["step"]) == 1 else None
        training = trainings[curve["training"]]
        (line,) = axes.plot(curve["step"], curve["value"], color=colour_of(curve["training"]), lw=1.4, marker=marker)
        handles.setdefault(training, line)
    shown = dict(list(handles.items())[:_MOST_NAMED])
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False)
    figure.suptitle(title)
    write_figure(path, figure)
    return tuple(names)
