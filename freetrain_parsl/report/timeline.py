"""The timeline of a run: nodes over time, main jobs grey, training jobs coloured, checkpoints and rescales marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.places import lanes_by_node
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.output import write_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.artist import Artist

    from freetrain_parsl.report.projection.run import Fragment, RunState

__all__ = ["draw_timeline"]

_HEIGHT = 0.72  # of a row, for training jobs
_OTHERS: dict[str, Any] = {"facecolor": "#8a8a8a", "edgecolor": "white", "linewidth": 0.6}
_OURS: dict[str, Any] = {"edgecolor": "#444444", "hatch": "////"}
_CHECKPOINT: dict[str, Any] = {"marker": "v", "color": "black", "linestyle": "none"}


def draw_timeline(
    run: RunState, history: Sequence[Mapping[str, Any]], path: Path, *, title: str, others: str = "main job"
) -> None:
    """Draw a run to a PNG or SVG file.

    Parameters
    ----------
    run
        Read from the journal.
    history
        Jobs on nodes: ``node``, ``kind`` (``main`` or ``preemptible``), ``start``, ``end`` (``None``: still running).
    path
        Output file; the suffix selects the format.
    title
        Title of the picture.
    others
        What the jobs of kind ``main`` are, for the legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    nodes = sorted({stay["node"] for stay in history})
    row = {node: index for index, node in enumerate(nodes)}
    begin = min(stay["start"] for stay in history)
    times = [end for stay in history if (end := stay["end"]) is not None]
    times += [fragment.end or fragment.start for fragment in run.fragments]
    finish = max(times, default=begin + 1.0)
    names = list(run.trainings)
    slots = max((fragment.slots_per_node for fragment in run.fragments), default=1)
    tall = max(0.42, 0.13 * slots)  # inches of a row: slots of a node that jobs share can be told apart

    figure = Figure(figsize=(13, 1.8 + tall * len(nodes) + 0.16 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stay in history:
        held = (stay["start"] - begin, (stay["end"] or finish) - stay["start"])
        look = _OTHERS if stay["kind"] == "main" else {**_OURS, "facecolor": "none", "linewidth": 0.5, "alpha": 0.45}
        axes.broken_barh([held], (row[stay["node"]] - 0.42, 0.84), **look)
    lanes = _lanes(run)
    for fragment in run.fragments:
        colour = colour_of(names.index(fragment.training))
        length = (fragment.end or finish) - fragment.start
        for node, top, whole in _bars(fragment):
            height = whole / lanes.get(fragment.array, 1)  # the members of an array share the room of its node
            if node in row:
                axes.broken_barh(
                    [(fragment.start - begin, length)],
                    (row[node] - 0.36 + top + fragment.lane * height, height),
                    facecolor=colour,
                    linewidth=0,
                )
    _mark_rescales(axes, run, row, begin)
    for time, training in run.checkpoints:
        saved_in = next(
            (f for f in run.fragments if f.training == training and f.start <= time <= (f.end or finish)),
            None,
        )
        if saved_in is not None:
            node, top, height = _bars(saved_in)[0]
            place = 0.22 if height == _HEIGHT else top + height / 2 - _HEIGHT / 2
            if node in row:
                axes.plot(time - begin, row[node] + place, markersize=4, **_CHECKPOINT)
    axes.set_yticks(range(len(nodes)), [f"{run.node_kinds.get(node, '')} {node}".strip() for node in nodes])
    axes.set_ylim(len(nodes) - 0.4, -0.6)
    axes.set_xlim(0, finish - begin)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles: list[Artist] = [Patch(color=colour_of(index), label=name) for index, name in enumerate(names)]
    handles += [
        Patch(color="#8a8a8a", label=others),
        Patch(facecolor="white", label="our block, starting or idle", **_OURS),
        Line2D([], [], markersize=5, label="checkpoint", **_CHECKPOINT),
        Line2D([], [], marker="|", color="black", linestyle="none", markersize=10, markeredgewidth=2, label="rescale"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    write_figure(path, figure)


def _bars(fragment: Fragment) -> list[tuple[str, float, float]]:
    """Return node, distance from the top of its row, and height of each bar of a fragment; slots share the row."""
    lane = _HEIGHT / fragment.slots_per_node
    return [
        (node, first * lane, number * lane)
        for node, runs in lanes_by_node(fragment.nodes).items()
        for first, number in runs or [(0, fragment.slots_per_node)]
    ]


def _lanes(run: RunState) -> dict[str, int]:
    """Return the number of members that each array has had at a time."""
    lanes: dict[str, int] = {}
    for fragment in run.fragments:
        if fragment.array:
            lanes[fragment.array] = max(lanes.get(fragment.array, 1), fragment.lane + 1)
    return lanes


def _mark_rescales(axes: Any, run: RunState, row: Mapping[str, int], begin: float) -> None:
    """Draw a black line where a training job continues on other nodes."""
    before: dict[str, tuple[str, ...]] = {}
    for fragment in run.fragments:
        if fragment.training in before and before[fragment.training] != fragment.nodes:
            for node, top, height in _bars(fragment):
                if node in row:
                    first = row[node] - _HEIGHT / 2 + top - 0.04
                    ends = [first, first + height + 0.08]
                    axes.plot([fragment.start - begin] * 2, ends, color="black", linewidth=1.6)
        before[fragment.training] = fragment.nodes
