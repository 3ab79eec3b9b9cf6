"""``freetrain explain``: shows which windows are used, and why the others are not."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freetrain_parsl.campaign.directories import run_directories
from freetrain_parsl.campaign.run_source import CampaignSource
from freetrain_parsl.campaign.stored_run import StoredRun
from freetrain_parsl.campaign.summary import journal_state_of
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.preview import ask_planner
from freetrain_parsl.cli.runs.run_directory import open_run
from freetrain_parsl.cli.runs.script_view import reason_figures, reason_lines
from freetrain_parsl.cli.sources import SourceOptions, choose_source, with_source_options
from freetrain_parsl.cli.windows import notes_view, window_row
from freetrain_parsl.errors import FreeTrainError, InvalidInput, UsageError, did_you_mean
from freetrain_parsl.planning.blocks import format_span
from freetrain_parsl.screen import say, say_json
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.cli.preview import PlannerAnswer
    from freetrain_parsl.planning.explain import Verdict

_REASONS_SHOWN = 12


@with_source_options
def explain(
    campaign: Annotated[
        str | None,
        typer.Argument(
            metavar="[CAMPAIGN]",
            help="Campaign file, or a run directory. Default: one training job on any number of nodes.",
        ),
    ] = None,
    training: Annotated[
        str | None, typer.Argument(metavar="[TRAINING]", help="Of a run: the name of a training job. Default: all.")
    ] = None,
    *,
    options: SourceOptions,
    variables: Variables,
    all_: Annotated[
        bool, typer.Option("--all", help=f"Show all reasons why nodes are in no window, not just {_REASONS_SHOWN}.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of sentences.")] = False,
) -> None:
    """Show for every window whether it would be used now, and if not, why. Submits nothing.

    Of a run: why each training job waits, as its driver has recorded last; at several sites: why it is at its site.
    """
    if campaign is not None and Path(campaign).is_dir():
        figures, lines = _explain_directory(Path(campaign).absolute(), training)
        if json:
            say_json(figures)
        else:
            Screen().print("\n".join(lines), highlight=False, soft_wrap=True)
        return
    if training is not None:
        raise UsageError(f"{campaign} is not a run directory: of a campaign file, no training job is named")
    chosen = choose_source(options, variables)
    if chosen.remark:
        say(chosen.remark, err=True)
    answer = ask_planner(chosen, campaign, variables)
    answer = replace(answer, notes=(*runs_here(), *answer.notes))
    if json:
        say_json(explanation_figures(answer))
    else:
        print_explanation(Screen(), answer, chosen.title, most=None if all_ else _REASONS_SHOWN)


def _explain_directory(directory: Path, training: str | None) -> tuple[dict[str, Any], Iterable[str]]:
    """Describe why the training jobs of a run are where they are, as figures and as sentences."""
    source = open_run(directory)
    if isinstance(source, CampaignSource) and (kind := source.kind()) is not None:
        figures = kind.explain(StoredRun(directory))
        _keep_one(figures, training, directory)
        return figures, kind.sentences(figures)
    figures = reason_figures(source)
    _keep_one(figures, training, directory)
    return figures, reason_lines(figures)


def _keep_one(figures: dict[str, Any], training: str | None, directory: Path) -> None:
    """Leave out the other training jobs."""
    if training is None:
        return
    known = [item["name"] for item in figures["trainings"]]
    if training not in known:
        raise InvalidInput(f"{directory} has no training job {training[:80]!r}{did_you_mean(training[:80], known)}")
    figures["trainings"] = [item for item in figures["trainings"] if item["name"] == training]


def runs_here() -> Iterator[str]:
    """Report what a user should know of runs in this directory.

    Blocks that cannot start, accelerators that no waiting job can use, no storage, training jobs that make no progress
    or cannot fuse, and the batches that the driver has chosen.
    """
    for directory in run_directories():
        try:
            run = journal_state_of(StoredRun(directory.absolute()))
        except FreeTrainError:
            continue  # of another version
        if run is None:
            continue
        yield from (f"{directory}: {reason}" for reason in [*run.reasons(time.time()), run.free_slots] if reason)
        reasons: defaultdict[str, list[str]] = defaultdict(list)
        for training in run.trainings.values():
            if training.state not in ("waiting", "running"):
                continue
            if training.waits_for:
                reasons[f"cannot start: {training.waits_for}"].append(training.name)
            if why := training.stall() or training.waiting_reason():
                reasons[why].append(training.name)
            if why := training.fusion_notice():
                reasons[why].append(training.name)
            if training.note:
                reasons[training.note].append(training.name)
            if batch := training.batch_remark():
                reasons[f"trains {batch}"].append(training.name)
        for reason, names in reasons.items():
            yield f"{directory}: {', '.join(names[:3])}{', …' if names[3:] else ''}: {reason}"


def explanation_figures(answer: PlannerAnswer) -> dict[str, Any]:
    """Describe verdicts for JSON."""
    return {
        "time": answer.survey.time,
        "windows": [
            {**window_row(verdict.window), "used": list(verdict.used), "why_not": verdict.why or None}
            for verdict in answer.explanation.verdicts
        ],
        "free_accelerators": answer.explanation.free_slots or None,
        "nodes_in_no_window": dict(answer.survey.unused),
        "notes": list(answer.notes),
    }


def print_explanation(console: Screen, answer: PlannerAnswer, title: str, most: int | None) -> None:
    """Print one sentence per window, then the `most` frequent reasons why nodes are in no window."""
    when = time.strftime("%H:%M:%S", time.localtime(answer.survey.time))
    verdicts = answer.explanation.verdicts
    number = {0: "no windows", 1: "1 window"}.get(len(verdicts), f"{len(verdicts)} windows")
    lines = [f"{title}: {number} at {when}"]
    lines += [verdict_sentence(verdict, answer.survey.time) for verdict in verdicts]
    lines += filter(None, [answer.explanation.free_slots])
    lines += unused_lines(answer.survey.unused, most)
    console.print("\n".join(lines), highlight=False)
    for note in notes_view(answer.notes):
        console.print(note)


def verdict_sentence(verdict: Verdict, now: float) -> str:
    """Describe the use of a window."""
    window = verdict.window
    lasts = ", no end known" if window.closes is None else f" × {format_span(window.closes - now)}"  # noqa: RUF001 - a product
    kind = f" of kind {window.node_kind}" if window.node_kind else ""
    head = f"window of {_nodes(len(window.nodes))}{kind}{lasts} ({show_hosts(window.nodes)})"
    if not verdict.why:
        return f"{head} used"
    if not verdict.used:
        return f"{head} not used: {verdict.why}"
    return f"{head} used on {show_hosts(verdict.used)} only: {verdict.why}"


def unused_lines(unused: Mapping[str, str], most: int | None) -> list[str]:
    """Group nodes by the reason why they are in no window, most nodes first."""
    if not unused:
        return []
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for node, why in unused.items():
        groups[why].append(node)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"{_nodes(len(unused))} in no window:"]
    lines += [f"  {show_hosts(nodes)}: {why}" for why, nodes in ranked[:most]]
    if rest := ranked[most:] if most is not None else []:
        lines.append(f"  {_nodes(sum(len(nodes) for _, nodes in rest))} for {len(rest)} other reasons: --all")
    return lines


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
