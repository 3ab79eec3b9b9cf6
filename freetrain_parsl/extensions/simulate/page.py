"""The result of a simulation: on a terminal, and as one HTML page without scripts, fonts or external resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl.extensions.pages import charts
from freetrain_parsl.extensions.pages.charts import Series
from freetrain_parsl.extensions.pages.dates import TimeAxis
from freetrain_parsl.extensions.replay.page.wording import count, duration, milliseconds, percent
from freetrain_parsl.extensions.replay.terminal import plain_table
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.report.markup import document, element, page, row, table, terms
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from xml.etree.ElementTree import Element

    from rich.table import Table

__all__ = ["heading", "result_table", "write_page"]

_BINS = 400
_KNOWING = {
    "none": "nothing of the work left",
    "age": "attained service",
    "curves": "work left, learning curves",
    "work": "work left",
}
_WORDS = {
    "Completion time": "From the submission of a job to its end, waiting included.",
    "Restart": "A change of a job's GPUs after its first start. It stands still meanwhile.",
    "Goodput": "Progress: steps per second times what each is worth in steps of the initial batch size.",
    "Ended": "GPU time of jobs that ended before the next decision.",
}


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the report of a simulation as one self-contained HTML file."""
    policies = [{**entry, "label": _label(entry)} for entry in result["policies"]]
    workload = result["workload"]["name"]
    parts = [*_opening(result, policies), *_comparison(policies)]
    for entry in policies:
        parts += _policy(entry, result["cluster"]["gpus"])
    parts += terms(_WORDS)
    parts += [element("h2", "To reproduce this page"), element("pre", element("code", result["command"]))]
    write_output(path, document(page(f"{workload}: completion times", *parts)))


def _label(entry: Mapping[str, Any]) -> str:
    return f"{entry['policy']}, knowing {_KNOWING[entry['knowledge']]}"


def _opening(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> list[Element]:
    best = min(policies, key=lambda entry: entry["mean_jct"])
    workload, cluster = result["workload"], result["cluster"]
    rest = "" if len(policies) == 1 else f", the best of {len(policies)} policies"
    return [
        element("p", f"FreeTrain simulation of {workload['name']}", class_="eyebrow"),
        element("h1", f"A job takes {duration(best['mean_jct'])} on average"),
        element(
            "p",
            f"{workload['jobs']:,} jobs submitted within {duration(workload['seconds'])} to {cluster['nodes']:,} nodes "
            f"of {cluster['gpus_per_node']} GPUs, scheduled by {best['label']}{rest}.",
            class_="lede",
        ),
    ]


def _comparison(policies: Sequence[Mapping[str, Any]]) -> list[Element]:
    longest = max(entry["p99_jct"] for entry in policies)
    edges = np.linspace(0, longest, _BINS + 1)[1:]
    series = [
        Series(entry["label"], colour_of(index), _share_done(entry, edges)) for index, entry in enumerate(policies)
    ]
    title = "Distribution of completion times"
    summary = "; ".join(f"{entry['label']}: median {duration(entry['median_jct'])}" for entry in policies)
    return [
        element("h2", "Comparison of policies"),
        charts.figure(
            title,
            "Share of the jobs that are done within a time of their submission, up to the longest 1 %.",
            charts.lines(title, summary, series, axis=TimeAxis(longest), low=0.0),
            charts.legend([(one.name, one.colour) for one in series]),
        ),
        _table(policies),
    ]


def _share_done(entry: Mapping[str, Any], edges: np.ndarray) -> list[float]:
    times = np.sort([job["jct"] for job in entry["jobs"]])
    return [float(share) for share in np.searchsorted(times, edges, side="right") / len(times)]


def _table(policies: Sequence[Mapping[str, Any]]) -> Element:
    def gpu_share(cause: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda entry: percent(entry["gpu_seconds"][cause] / sum(entry["gpu_seconds"].values()))

    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("Mean completion time", lambda e: duration(e["mean_jct"])),
        ("Median", lambda e: duration(e["median_jct"])),
        ("99 % within", lambda e: duration(e["p99_jct"])),
        ("All jobs done after", lambda e: duration(e["makespan"])),
        ("Restarts", lambda e: count(e["restarts"])),
        ("GPU time: training", gpu_share("training")),
        ("GPU time: restarts", gpu_share("restarts")),
        ("GPU time: ended", gpu_share("ended")),
        ("GPU time: idle", gpu_share("idle")),
        ("Median decision", lambda e: milliseconds(e["solve_ms_median"])),
        ("99 % of decisions within", lambda e: milliseconds(e["solve_ms_p99"])),
    ]
    body = [row(name, *map(cell, policies)) for name, cell in rows]
    return table("Policies compared", ("", *(entry["label"] for entry in policies)), body)


def _policy(entry: Mapping[str, Any], gpus: int) -> list[Element]:
    series = entry["series"]
    axis = TimeAxis(series["seconds"])
    waiting = Series("waiting", "#D55E00", series["waiting"])
    running = Series("running", "#0072B2", series["running"])
    return [
        element("h2", entry["label"]),
        charts.figure(
            "GPUs in use",
            f"Of {gpus:,} GPUs.",
            charts.stacked_areas(
                "GPUs in use",
                f"{percent(1 - entry['gpu_seconds']['idle'] / sum(entry['gpu_seconds'].values()))} on average",
                [Series("in use", "#0072B2", series["gpus"])],
                axis=axis,
            ),
        ),
        charts.figure(
            "Jobs",
            "Running and waiting.",
            charts.stacked_areas("Jobs", f"at most {max(series['waiting']):.0f} wait", [running, waiting], axis=axis),
            charts.legend([(one.name, one.colour) for one in (running, waiting)]),
        ),
        *_life(entry["life"]),
    ]


def _life(life: Mapping[str, Any]) -> list[Element]:
    """Draw the life of the job with the most restarts: its GPUs, its batch and its goodput."""
    axis = TimeAxis(life["seconds"])
    edges = np.linspace(0, life["seconds"], _BINS, endpoint=False)
    at = np.searchsorted([phase["time"] for phase in life["phases"]], edges, side="right") - 1
    made = [element("h3", f"The life of {life['job']}, the job with the most restarts")]
    for key, title in (("gpus", "GPUs"), ("batch", "Batch size"), ("speed", "Goodput")):
        values = [float(life["phases"][i][key]) if i >= 0 else 0.0 for i in at]
        text = "Steps of the initial batch per second." if key == "speed" else ""
        chart = charts.stacked_areas(title, f"at most {max(values):,g}", [Series(title, "#009E73", values)], axis=axis)
        made.append(charts.figure(title, text, chart))
    return made


def heading(result: Mapping[str, Any]) -> str:
    """Describe the workload and the cluster."""
    workload, cluster = result["workload"], result["cluster"]
    return (
        f"{workload['name']}: {workload['jobs']:,} jobs submitted within {duration(workload['seconds'])}, on "
        f"{cluster['nodes']:,} nodes of {cluster['gpus_per_node']} GPUs"
    )


def result_table(result: Mapping[str, Any]) -> Table:
    """Build the table of the policies, at most 80 columns wide."""
    columns = ("mean\ntime", "median\ntime", "99 %\nwithin", "all\nafter", "restarts", "GPUs\nin use", "median\nsolve")
    shown = plain_table(("policy", "knows"), columns)
    for entry in result["policies"]:
        seconds = entry["gpu_seconds"]
        shown.add_row(
            entry["policy"],
            entry["knowledge"],
            duration(entry["mean_jct"]),
            duration(entry["median_jct"]),
            duration(entry["p99_jct"]),
            duration(entry["makespan"]),
            count(entry["restarts"]),
            percent(1 - seconds["idle"] / sum(seconds.values()), 0),
            milliseconds(entry["solve_ms_median"]),
        )
    return shown
