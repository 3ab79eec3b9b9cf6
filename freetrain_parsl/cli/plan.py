"""``freetrain plan``: shows the blocks that would be submitted now, their training jobs, and the gain."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.preview import CampaignArgument, ask_planner
from freetrain_parsl.cli.sources import SourceOptions, choose_source, with_source_options
from freetrain_parsl.cli.windows import NARROW, format_closing, format_duration, format_hosts, notes_view, window_row
from freetrain_parsl.screen import say, say_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.cli.preview import PlannerAnswer
    from freetrain_parsl.planning.explain import Preview, Share

_PLAIN: dict[str, Any] = {"highlight": False}


@with_source_options
def plan(
    campaign: CampaignArgument = None,
    *,
    options: SourceOptions,
    variables: Variables,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of a table.")] = False,
) -> None:
    """Show the blocks that would be submitted now and what each gains. Submits nothing."""
    chosen = choose_source(options, variables)
    if chosen.remark:
        say(chosen.remark, err=True)
    answer = ask_planner(chosen, campaign, variables)
    if json:
        say_json(plan_figures(answer))
    else:
        print_plan(Screen(), answer, chosen.title)


def plan_figures(answer: PlannerAnswer) -> dict[str, Any]:
    """Describe the plan for JSON; times in seconds, timestamps since the epoch."""
    preview = answer.explanation.plan
    blocks = [
        {
            **window_row(request.window),
            "nodes": len(request.nodes),
            "node_names": list(request.nodes),
            "walltime": request.seconds,
            "node_seconds": _node_seconds(shares),
            "samples": _samples(shares),
            "trainings": [
                {
                    "name": share.trainer,
                    "nodes": share.nodes,
                    "accelerators": share.slots,
                    "node_seconds": share.node_seconds,
                    "samples": share.samples,
                }
                for share in shares
            ],
        }
        for request, shares in zip(preview.requests, preview.shares, strict=True)
    ]
    decision = preview.decision
    return {
        "time": answer.survey.time,
        "windows": len(answer.survey.windows),
        "blocks": blocks,
        "proven_optimal": None if decision is None else decision.proven_optimal,
        "solve_seconds": None if decision is None else decision.solve_seconds,
        "notes": list(answer.notes),
        "slots_per_node": answer.slots_per_node,
        "units_per_node": answer.units_per_node,
    }


def print_plan(console: Screen, answer: PlannerAnswer, title: str) -> None:
    """Print one row per block, and their total gain."""
    plan, now = answer.explanation.plan, answer.survey.time
    when = time.strftime("%H:%M:%S", time.localtime(now))
    if plan.requests:
        what = "block" if len(plan.requests) == 1 else "blocks"
        console.print(f"{title}: {len(plan.requests)} {what} would be submitted at {when}", **_PLAIN)
        console.print(plan_table(plan, now, narrow=console.width < NARROW))
        total = [share for shares in plan.shares for share in shares]
        samples = "" if _samples(total) is None else f" and {_format_samples(total)} samples"
        console.print(f"{_node_seconds(total) / 3600:.2f} node-hours of training{samples}, after start-up", **_PLAIN)
    else:
        console.print(f"{title}: nothing would be submitted at {when}", **_PLAIN)
    if left := sum(bool(verdict.why) for verdict in answer.explanation.verdicts):
        windows = "1 window is" if left == 1 else f"{left} windows are"
        console.print(f"{windows} unused or only partly used: freetrain explain shows why", **_PLAIN)
    elif not answer.survey.windows:
        console.print("no nodes are idle: freetrain explain shows what they do", **_PLAIN)
    for note in notes_view(answer.notes):
        console.print(note)


def plan_table(plan: Preview, now: float, *, narrow: bool = False) -> Table:
    """Draw the blocks, one row each."""
    with_samples = any(share.samples is not None for shares in plan.shares for share in shares)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("nodes", justify="right")
    kinds = any(request.window.node_kind for request in plan.requests)
    if kinds:
        table.add_column("of kind", no_wrap=True)
    table.add_column("walltime", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("closes", no_wrap=True)
    table.add_column("training", overflow="fold", min_width=12)
    table.add_column("node-hours", justify="right")
    if with_samples:
        table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("names", overflow="fold")
    for request, shares in zip(plan.requests, plan.shares, strict=True):
        table.add_row(
            str(len(request.nodes)),
            *([request.window.node_kind] if kinds else []),
            format_duration(request.seconds),
            *([] if narrow else [format_closing(request.window, now)]),
            Text("\n".join(f"{share.trainer} on {_size(share)}" for share in shares)),
            f"{_node_seconds(shares) / 3600:.2f}",
            *([_format_samples(shares)] if with_samples else []),
            format_hosts(request.nodes),
        )
    return table


def _size(share: Share) -> str:
    if share.slots is None:
        return str(share.nodes)
    return f"{share.slots} accelerator{'' if share.slots == 1 else 's'}"


def _node_seconds(shares: Iterable[Share]) -> float:
    return sum(share.node_seconds for share in shares)


def _samples(shares: Iterable[Share]) -> float | None:
    known = [share.samples for share in shares if share.samples is not None]
    return sum(known) if known else None


def _format_samples(shares: Iterable[Share]) -> str:
    samples = _samples(shares)
    return "?" if samples is None else f"{samples:,.0f}"
