"""``freetrain report`` as a page: what a run used, by cause, what it gave back, and its requests."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.report.markup import cards, document, element, page, row, table
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from xml.etree.ElementTree import Element

__all__ = ["missing_lines", "node_time_rows", "write_report_page"]

_PHASES: Final = {
    "starting": "starting, until the workers are ready",
    "training": "training",
    "between": "ready, without a training job",
    "leaving": "leaving: saving, and ending the block",
}
"""What a node that is held is doing -> in words."""
_UNUSED: Final = {
    "requested, but given back before the walltime": "returned_node_seconds",
    "requested, but preempted or lost before the walltime": "cut_short_node_seconds",
}
"""Where time that was requested but not held went -> key of the figures."""

_HOUR = 3600.0


def write_report_page(figures: Mapping[str, Any], path: Path) -> None:
    """Write the page of a run, with the figures of ``freetrain report --json``."""
    parts = [*_opening(figures), *_node_time(figures), *_blocks(figures), *_requests(figures)]
    write_output(path, document(page(f"{figures['name']}: node time", *parts)))


def _opening(figures: Mapping[str, Any]) -> list[Element]:
    held = figures["held_node_seconds"]
    trainings = figures["trainings"]
    began = "" if figures["begin"] is None else f", {_clock(figures['begin'])} to {_clock(figures['end'])}"
    main = [
        (
            "Training jobs finished",
            f"{trainings['finished']} of {sum(trainings.values())}",
            f"{figures['samples']:,} samples",
        ),
        ("In steps that count", _share(figures["useful_node_seconds"], held), "of the node-hours held"),
        ("Given back", f"{_hours(figures['returned_node_seconds'])} h", "node-hours requested, not needed"),
        ("Left early", str(figures["blocks_yielded"]), "blocks, for jobs of other users"),
    ]
    return [
        element("p", f"FreeTrain run in {figures['run_dir']}{began}", class_="eyebrow"),
        element("h1", f"{figures['name']}: {_hours(held)} node-hours"),
        *(element("p", line) for line in missing_lines(figures)),
        cards(main),
    ]


def missing_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return what the figures lack, one line for each journal that is missing."""
    return [f"the journal {path} is missing: nothing of its driver is counted" for path in figures["missing_journals"]]


def node_time_rows(figures: Mapping[str, Any]) -> Iterator[tuple[int, str, float, float | None]]:
    """Yield depth, name, node-seconds and, of the node time that was held, the share."""
    held = figures["held_node_seconds"]

    def part(depth: int, name: str, seconds: float) -> tuple[int, str, float, float | None]:
        return depth, name, seconds, seconds / held if held else None

    yield part(0, "held by our blocks", held)
    for phase, seconds in figures["node_seconds"].items():
        yield part(1, _PHASES[phase], seconds)
        if phase == "training":
            yield part(2, "of it in steps that count", figures["useful_node_seconds"])
    for name, key in _UNUSED.items():
        yield 0, name, figures[key], None


def _node_time(figures: Mapping[str, Any]) -> list[Element]:
    body, slots = [], figures["shared_slots_per_node"]
    units = ("node-hours", "accelerator-hours")[: min(2, slots)]
    for depth, name, seconds, share in node_time_rows(figures):
        bar = None if share is None else element("span", _bar(share), class_="track")
        cell = element("td", "" if share is None else f"{share:.1%}", bar)
        hours = (_hours(seconds), _hours(slots * seconds))[: len(units)]
        body.append(row(f"{'·' * depth} {name}".lstrip(), *hours, cell))
    return [element("h2", "Node time, by cause"), table("Node time", ("", *units, "share"), body)]


def _bar(share: float) -> Element:
    return element("span", style=f"width: {100 * min(1.0, share):.1f}%")


def _blocks(figures: Mapping[str, Any]) -> list[Element]:
    left = (
        [("running, or their driver was killed", figures["blocks_unfinished"])] if figures["blocks_unfinished"] else []
    )
    body = [row(reason, f"{count:,}") for reason, count in [*figures["block_endings"].items(), *left]]
    text = (
        f"{figures['blocks_requested']:,} blocks were requested, {figures['blocks_started']:,} started. "
        f"{figures['blocks_yielded']:,} left their nodes early because a job of another user could start there; "
        f"{figures['closing_notices']:,} times the batch system announced that it reclaims a node. "
        f"{figures['fragments_lost']:,} times a training job lost a process or a node; {figures['samples_lost']:,} "
        "samples "
        f"were lost and {figures['duplicate_samples']:,} trained on more than once in an epoch. "
        f"In all there were {figures['failures']:,} failures, and {figures['notices']:,} waits and other notices."
    )
    parts = [element("h2", "Blocks, and other users"), element("p", text)]
    return [*parts, table("How blocks ended", ("how they ended", "blocks"), body)] if body else parts


def _requests(figures: Mapping[str, Any]) -> list[Element]:
    title = element("h2", "Requests to the batch system")
    hours = figures["requests_by_hour"]
    if not hours:
        return [title, element("p", "The journals have none: the run used an embedded cluster.")]
    commands = sorted(figures["requests"])
    span = max(_HOUR, (figures["end"] or 0.0) - (figures["begin"] or 0.0))
    total = sum(figures["requests"].values())
    busiest = max(sum(hour["counts"].values()) for hour in hours)
    text = (
        f"The drivers ran {total:,} commands of the batch system in {span / _HOUR:.3g} hours, "
        f"{_HOUR * total / span:,.0f} an hour; in the busiest hour {busiest:,}."
    )
    body = [
        row(_clock(hour["begin"]), *(f"{hour['counts'].get(command, 0):,}" for command in commands)) for hour in hours
    ]
    return [title, element("p", text), table("Commands by hour", ("hour from", *commands), body)]


def _hours(seconds: float) -> str:
    hours = seconds / _HOUR
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.3g}"


def _share(seconds: float, held: float) -> str:
    return f"{seconds / held:.1%}" if held else ""


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"
