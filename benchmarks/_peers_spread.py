"""The results of `peers.py` by way: medians with the range over the seeds, and a picture."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from freetrain_parsl.report.output import write_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FIGURES = (
    "useful_per_offered", "held_per_offered", "start_s", "repeated_per_held", "finished", "samples_lost",
    "samples_repeated", "loss_gap", "delay_s_max", "requests_per_minute", "batch_jobs_failed", "queue_length", "lines",
    "left_after_kill", "environment_calls_per_start", "directory_calls_per_node_minute",
)  # fmt: skip
COLOURS = {"useful": "#1f77b4", "held": "#c6dbef"}


def by_way(rows: Sequence[dict[str, Any]], name: str) -> dict[str, list[float]]:
    """Return a figure's values of each way that has it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            found.setdefault(row["way"], []).append(row[name])
    return found


def spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each figure: of each way the median, and in brackets the least and the most if they differ."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    table = []
    for name in FIGURES:
        values = by_way(rows, name)
        table.append({"figure": name.replace("_", " "), **{way: _range(values.get(way, [])) for way in ways}})
    return table


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle, least, most = (f"{value:.3g}" for value in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw what each way held and used of the offered node time: medians as bars, and each seed as a point."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    useful, held = by_way(rows, "useful_per_offered"), by_way(rows, "held_per_offered")
    ways = sorted(useful, key=lambda way: median(useful[way]))
    figure, axis = plt.subplots(figsize=(7, 0.6 * len(ways) + 1.2), layout="constrained")
    for label, values in (("held", held), ("useful", useful)):
        axis.barh(ways, [median(values[way]) for way in ways], color=COLOURS[label], label=f"{label}, median")
    seeds = [(value, way) for way in ways for value in useful[way]]
    axis.plot(*zip(*seeds, strict=True), "k.", label="useful, each seed")
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the node time in which no main job ran")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    write_figure(path, figure)
    plt.close(figure)
