"""Wording of a replay's report: formats of figures, and definitions of terms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "LOSSES",
    "NO_FIGURE",
    "WORDS",
    "Loss",
    "best_first",
    "count",
    "dedicated_nodes",
    "describe",
    "duration",
    "is_attainable",
    "milliseconds",
    "most_finished",
    "percent",
    "ratio",
    "samples",
    "way_name",
    "ways",
]

_Entry = TypeVar("_Entry", bound="Mapping[str, Any]")

_SPACE = "\N{NO-BREAK SPACE}"
NO_FIGURE = "\N{EN DASH}"


class Loss(NamedTuple):
    """A cause of efficiency below 100 %."""

    name: str
    colour: str
    meaning: str


# Key in the result -> cause. Okabe and Ito's colours, and grey for unused nodes.
LOSSES = {
    "loss_concavity": Loss(
        "uneven supply",
        "#CC79A7",
        "The number of idle nodes varies, that of dedicated nodes does not. A training job gains less from its "
        "hundredth "
        "node than from its first, so many nodes now do not compensate for few before. No plan can avoid this loss: it "
        "is 100 % less the oracle.",
    ),
    "loss_unused": Loss(
        "unused nodes", "#999999", "Idle nodes that the plan left unused although a training job could have used them."
    ),
    "loss_split": Loss(
        "suboptimal split",
        "#F0E442",
        "Nodes in use, but not allocated to the training jobs in the best way at that moment.",
    ),
    "loss_rescale": Loss(
        "rescaling",
        "#E69F00",
        "Time in which training jobs were paused because the plan gave them more or fewer nodes.",
    ),
    "loss_preemption": Loss(
        "preemption", "#D55E00", "Time in which training jobs were paused because nodes were taken from them."
    ),
    "loss_start": Loss("starting", "#009E73", "Time in which training jobs were started or resumed."),
}

WORDS = {
    "Efficiency (U)": "Samples that the training jobs processed in the idle nodes, divided by what the same "
    "training jobs "
    "process in the same time on dedicated nodes: as many as were idle on average (interpolated between integers), "
    "with the best constant allocation to the training jobs.",
    "Oracle": "The same replay if every change were free: at every event, all idle nodes are reallocated in the best "
    "way. It is the upper bound of the efficiency.",
    "Share of the oracle": "Efficiency divided by that of the oracle.",
    "Closing times": "A plan's information about when idle nodes will be needed again: none (unknown), estimates from "
    "walltimes and the queue at the time (estimated), or the actual times in the log (known). The last is not "
    "available to a real plan: it shows the potential of better estimates and is never the headline.",
    "Horizon": "How long a decision is expected to last: what a change costs is weighed against its gain in that time.",
    "Node-hour": "One node for one hour.",
}

_KNOWLEDGE = {
    "none": "closing times unknown",
    "estimated": "closing times estimated",
    "perfect": "closing times known",
}


def describe(entry: Mapping[str, Any], keys: Sequence[str] = ("knowledge", "horizon")) -> str:
    """Describe a policy's knowledge of closing times and its horizon, as far as they are in `keys`."""
    parts = []
    if "knowledge" in keys:
        parts.append(_KNOWLEDGE.get(entry["knowledge"], str(entry["knowledge"])))
    horizon = entry["horizon"]
    if "horizon" in keys and horizon is not None:
        ahead = f"{horizon} horizon" if isinstance(horizon, str) else f"horizon{_SPACE}{duration(horizon)}"
        parts.append(ahead)
    return ", ".join(parts)


def is_attainable(entry: Mapping[str, Any]) -> bool:
    """Return whether a plan is possible on a real machine: whether it does not use actual future closing times."""
    return bool(entry["knowledge"] != "perfect")


def best_first(entries: Iterable[_Entry]) -> list[_Entry]:
    """Sort policies by efficiency, best first; unattainable ones come last."""
    return sorted(entries, key=lambda entry: (is_attainable(entry), entry["efficiency"] or 0.0), reverse=True)


def most_finished(entries: Iterable[_Entry]) -> list[_Entry]:
    """Sort policies by how many members of sweeps finish, most first; unattainable ones come last."""
    return sorted(entries, key=lambda e: (is_attainable(e), e["sweep"]["finished"], e["sweep"]["work"]), reverse=True)


def ways(entry: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return how the members of sweeps trained with a policy: (name, figures, times to finish)."""
    alone = entry.get("one_by_one")
    if alone is None:
        return [("one by one", entry["sweep"], entry["jct"])]
    return [("fused", entry["sweep"], entry["jct"]), ("one by one", alone, alone["jct"])]


def way_name(way: Mapping[str, Any]) -> str:
    """Name a way of using several sites."""
    names = {"apart": "all, without moves", "together": "all, with moves", "one machine": "as one machine"}
    return f"{way['site']} alone" if way["way"] == "alone" else names[way["way"]]


def dedicated_nodes(number: float) -> str:
    """Format a mean number of dedicated nodes, which may be fractional."""
    text = f"{number:,.0f}" if number >= 1000 or number == round(number) else f"{number:,.1f}"
    text = f"{number:.2g}" if float(text.replace(",", "")) == 0 else text
    return f"{text} dedicated node{'s' * (text != '1')}"


def losses_met(policies: Sequence[Mapping[str, Any]]) -> dict[str, Loss]:
    """Return the `LOSSES` that occur in any of the policies."""
    return {key: loss for key, loss in LOSSES.items() if any(entry[key] for entry in policies)}


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share in per cent."""
    if share is None or math.isnan(share):
        return NO_FIGURE
    return f"{round(100 * share, digits) + 0.0:.{digits}f}{_SPACE}%"  # + 0.0: never "-0.0"


def ratio(value: float | None) -> str:
    """Format a ratio as a multiple."""
    return NO_FIGURE if value is None else f"{value:.3f}{_SPACE}\N{MULTIPLICATION SIGN}"


def count(value: float | None) -> str:
    """Format a number of things, with decimals only if it is small."""
    if value is None or math.isnan(value):
        return NO_FIGURE
    return f"{value:,.1f}" if abs(value) < 100 and value != round(value) else f"{value:,.0f}"


def samples(value: float | None) -> str:
    """Format a number of samples with three digits."""
    if value is None or math.isnan(value):
        return NO_FIGURE
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{_three_digits(value / size)}{_SPACE}{letter}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Format a time in a convenient unit."""
    if seconds is None or math.isnan(seconds):
        return NO_FIGURE
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{_three_digits(seconds / size)}{_SPACE}{unit}"
    return f"{_three_digits(seconds)}{_SPACE}s"


def milliseconds(value: float | None) -> str:
    """Format a short time given in milliseconds."""
    if value is None or math.isnan(value):
        return NO_FIGURE
    return f"{_three_digits(value)}{_SPACE}ms" if value < 1000 else duration(value / 1000)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
