"""``freetrain report``: what a run used and gave back, for its user and for a site's accounting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.run_directory import RunDirectory, open_run
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.report.report_page import missing_lines, node_time_rows, write_report_page
from freetrain_parsl.screen import say_json
from freetrain_parsl.texts import shortened

if TYPE_CHECKING:
    from freetrain_parsl.campaign.run_source import RunSource
    from freetrain_parsl.report.projection.projection import Projection

__all__ = ["report"]

_HOUR = 3600.0


def report(
    run_dir: RunDirectory = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Also write a page: one HTML file without scripts.")
    ] = None,
) -> None:
    """Show what a run used, by cause, and what it gave back."""
    with errors_in_one_line("report"):
        figures = run_report(open_run(run_dir))
        if page is not None:
            _write_page(figures, page)
        if json:
            say_json(figures)
            return
        console = Screen()
        console.say(
            f"{shortened(str(figures['name']))}: {figures['trainings']['finished']} of "
            f"{sum(figures['trainings'].values())} training jobs finished, {figures['samples']:,} samples, "
            f"in {figures['run_dir']}"
        )
        console.print(_time_table(figures))
        for line in _block_lines(figures):
            console.say(line)


def _write_page(figures: dict[str, Any], path: Path) -> None:
    try:
        write_report_page(figures, path)
    except OSError as error:
        raise InvalidInput(f"--page {path} cannot be written: {error.strerror or error}") from None


def run_report(source: RunSource) -> dict[str, Any]:
    """Return the figures of a run, from the journals of all its drivers.

    Parameters
    ----------
    source
        The run.

    Returns
    -------
    figures
        The keys of ``freetrain report --json``; areas in node-seconds. Where jobs share nodes, a node-second is
        ``shared_slots_per_node`` accelerator-seconds; that key is 1 otherwise.

    Raises
    ------
    InvalidInput
        A journal cannot be read.
    """
    run, missing = _read(source)
    account, progress = run.node_time(), run.progress
    trainings = source.trainings()
    states = ("finished", "running", "waiting", "failed", "cancelled")
    return {
        "name": source.name,
        "run_dir": str(source.directory),
        "begin": account.begin,
        "end": account.end,
        "drivers": source.drivers(),
        "trainings": {state: sum(item.state == state for item in trainings) for state in states},
        "samples": int(sum(each.get("samples", 0) for each in progress.values())),
        "samples_lost": int(sum(each.get("samples_lost", 0) for each in progress.values())),
        "duplicate_samples": int(sum(each.get("duplicate_samples", 0) for each in progress.values())),
        "held_node_seconds": account.held,
        "node_seconds": {phase.value: seconds for phase, seconds in account.phases.items()},
        "useful_node_seconds": account.useful,
        "shared_slots_per_node": account.shared_slots,
        "returned_node_seconds": account.returned,
        "cut_short_node_seconds": account.cut_short,
        "blocks_requested": account.requested,
        "blocks_started": account.started,
        "blocks_unfinished": account.unfinished,
        "block_endings": dict(account.endings.most_common()),
        "blocks_yielded": account.yielded,
        "closing_notices": account.closing_notices,
        "failures": run.incidents.failures,
        "notices": run.incidents.notices,
        "fragments_lost": account.lost_fragments,
        "requests": dict(sum(account.requests.values(), Counter[str]())),
        "requests_by_hour": [
            {"begin": hour, "counts": dict(counts)} for hour, counts in sorted(account.requests.items())
        ],
        "missing_journals": missing,
    }


def _read(source: RunSource) -> tuple[Projection, list[str]]:
    """Fold the journals, and list missing ones."""
    from freetrain_parsl.report.projection.projection import Projection
    from freetrain_parsl.report.run_reader import read_whole

    run, missing = Projection(), []
    for journal in source.journals():
        if journal.path.exists():
            read_whole(run, journal)
        else:
            missing.append(str(journal.path))
    return run, missing


def _time_table(figures: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("node time")
    table.add_column("node-hours", justify="right", no_wrap=True)
    slots = figures["shared_slots_per_node"]
    if slots > 1:
        table.add_column("accelerator-hours", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for depth, name, seconds, share in node_time_rows(figures):
        hours = [seconds / _HOUR, slots * seconds / _HOUR][: min(2, slots)]
        part = "" if share is None else f"{share:.1%}"
        table.add_row(f"{'  ' * depth}{name}", *(f"{each:.3f}" for each in hours), part)
    return table


def _block_lines(figures: dict[str, Any]) -> list[str]:
    head = (
        f"blocks: {figures['blocks_requested']} requested, {figures['blocks_started']} started; "
        f"{figures['blocks_yielded']} left early for jobs of other users; "
        f"{figures['closing_notices']} notices that a node is reclaimed"
    )
    lines = [head, *(f"  {count}: {reason}" for reason, count in figures["block_endings"].items())]
    if figures["blocks_unfinished"]:
        lines.append(f"  {figures['blocks_unfinished']}: running, or their driver was killed")
    if figures["requests"]:
        counts = ", ".join(f"{count:,} {command}" for command, count in sorted(figures["requests"].items()))
        busiest = max(sum(hour["counts"].values()) for hour in figures["requests_by_hour"])
        lines.append(f"requests to the batch system: {counts}; at most {busiest:,} in an hour")
    lines.append(
        f"samples lost {figures['samples_lost']:,}, trained on more than once in an epoch "
        f"{figures['duplicate_samples']:,}; {figures['fragments_lost']} fragments ended by a failure"
    )
    lines.append(f"failures: {figures['failures']:,}; waits and other notices: {figures['notices']:,}")
    lines += missing_lines(figures)
    return lines
