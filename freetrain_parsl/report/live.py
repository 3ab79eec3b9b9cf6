"""The live view of a run in a terminal: nodes and their jobs, windows, training jobs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freetrain_parsl.places import lanes_by_node, node_of
from freetrain_parsl.report.colours import colour_of
from freetrain_parsl.texts import printable, shortened
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from freetrain_parsl.report.projection.run import RunState, TrainingState

__all__ = ["live_view", "remarks", "training_table"]

_MEMBERS_SHOWN = 4  # of an array
_STATE_STYLES = {"waiting": "dim", "running": "bold", "finished": "green", "failed": "bold red", "cancelled": "dim"}


def live_view(
    run: RunState, nodes: Mapping[str, Mapping[str, Any]], now: float, elapsed: float, title: str
) -> RenderableType:
    """Draw the state of a run; `nodes` is node -> ``kind`` of its holder (``preemptible`` is ours) and ``job``."""
    head = f"{shortened(title)} · {elapsed:.0f} s · {run.completed} of {len(run.trainings)} training jobs done"
    parts: list[RenderableType] = [_node_table(run, nodes, now), Text(), training_table(run.trainings.values())]
    return Group(Panel(Group(*parts, *remarks(run.trainings.values(), now)), title=Text(head)))


def remarks(trainings: Iterable[TrainingState], now: float) -> list[RenderableType]:
    """Report what a user should know of the training jobs: why one cannot start or save, which run fused.

    Those with the same remark share a line.
    """
    names = defaultdict(list)
    for training in trainings:
        if remark := training.remark(now):
            names[remark].append(training.name)
    return [Text(f"{_some(those)} {printable(remark)}", style="yellow") for remark, those in names.items()]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(shortened, names[:_MEMBERS_SHOWN]))
    return f"{shown} and {len(names) - _MEMBERS_SHOWN} more" if len(names) > _MEMBERS_SHOWN else shown


def _node_table(run: RunState, nodes: Mapping[str, Mapping[str, Any]], now: float) -> Table:
    """Draw one row per node: its name, its holder, and when its window closes."""
    names = list(run.trainings)
    trainers = defaultdict(list)
    for training in run.trainings.values():
        for node, lanes in lanes_by_node(training.nodes).items():
            trainers[node].append((lanes[0][0] if lanes else 0, training))
    closes = {node: window["closes"] for window in run.windows for node in window["nodes"]}
    table = Table(box=None, padding=(0, 2), expand=True)
    for column in ("node", "held by", "window"):
        table.add_column(column, header_style="dim")
    for node, holder in nodes.items():
        if node in trainers:
            jobs = [training for _, training in sorted(trainers[node], key=lambda each: each[0])]
            slots = [_slots_on(node, training) for training in jobs]
            most = max(_MEMBERS_SHOWN, run.slots_per_node)
            shown = [
                Text(f"■ {shortened(training.name)}{on}", style=colour_of(names.index(training.name)))
                for training, on in zip(jobs[:most], slots, strict=False)
            ]
            who = Text(" ").join(shown)
            if more := len(jobs) - len(shown):
                way = "" if not jobs[0].array else ", in turns" if jobs[0].in_turns else ", fused"
                who.append(f" and {more} more{way}", style="dim")
            used = {unit for training in jobs for unit in training.nodes if node_of(unit) == node}
            if free := run.slots_per_node - len(used):
                who.append(f" {'□' * free} {free} free", style="grey74")
        elif holder["kind"] == "main":
            who = Text(f"■ main job {holder['job']}", style="grey50")
        elif holder["kind"] == "preemptible":
            who = Text("□ ours: starting, or between fragments", style="grey74")
        else:
            who = Text("·  idle", style="grey35")
        kind = run.node_kinds.get(node)
        table.add_row(f"{node} ({kind})" if kind else node, who, _time_left(node in closes, closes.get(node), now))
    return table


def _slots_on(node: str, training: TrainingState) -> str:
    """Return the slots that a training job has on a node that jobs share; empty: the whole node."""
    units = [unit for unit in training.nodes if node_of(unit) == node]
    return "" if len(units) == training.slots_per_node else f" /{show_hosts(units).partition('/')[2]}"


def _time_left(is_open: bool, closes: float | None, now: float) -> Text:  # noqa: FBT001 - two values of a table cell
    if not is_open:
        return Text("")
    return Text("open, end unknown" if closes is None else f"closes in {max(0.0, closes - now):.0f} s", style="cyan")


def training_table(trainings: Collection[TrainingState]) -> Table:
    """Draw one row per training job: progress, nodes or accelerators, fragments, last loss."""
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("training", header_style="dim", no_wrap=True)
    table.add_column("state", header_style="dim", no_wrap=True)
    table.add_column("progress", header_style="dim", ratio=1)
    shared = any(training.slots_per_node > 1 for training in trainings)
    for column in ("accelerators" if shared else "nodes", "fragments", "rescales", "epoch", "loss"):
        table.add_column(column, header_style="dim", justify="right", no_wrap=True)
    for index, training in enumerate(trainings):
        progress = training.progress
        loss = progress.get("loss")
        table.add_row(
            Text(f"■ {shortened(training.name)}", style=colour_of(index)),
            Text(training.state, style=_STATE_STYLES[training.state]),
            ProgressBar(total=1.0, completed=training.share_done or 0.0, complete_style=colour_of(index)),
            str(len(training.nodes)),
            str(training.fragments),
            str(training.rescales),
            str(progress.get("epoch", "")),
            "" if loss is None else f"{loss:.4f}",
        )
    return table
