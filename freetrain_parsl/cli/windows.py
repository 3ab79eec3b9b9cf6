"""``freetrain windows``: shows which nodes are idle until when, like ``showbf`` of Maui and Moab."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.sources import ChosenSource, SourceOptions, choose_source, with_source_options
from freetrain_parsl.errors import BatchSystemError, UsageError
from freetrain_parsl.planning.model import Window, WindowKind
from freetrain_parsl.screen import say, say_json
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.windows.base import Survey

NARROW = 80
"""Terminal width in columns below which tables omit the least important columns."""


@with_source_options
def windows(
    *,
    options: SourceOptions,
    variables: Variables,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.2, metavar="SECONDS", help="Repeat at this interval until Ctrl-C.")
    ] = None,
) -> None:
    """Show the windows: how many nodes are idle for how long. Submits nothing."""
    chosen = choose_source(options, variables)
    variables.refuse_unused()
    if watch is not None and watch < chosen.least_interval:
        raise UsageError(
            f"--watch {watch:g}: {chosen.title} is shared; the shortest interval is {chosen.least_interval:g} s"
        )
    if chosen.remark:
        say(chosen.remark, err=True)
    if watch is not None:
        _watch(chosen, watch, json=json)
    elif json:
        say_json(window_rows(chosen.source.survey()))
    else:
        console = Screen()
        console.print(window_view(chosen.source.survey(), chosen.title, console.width))


def _watch(chosen: ChosenSource, interval: float, *, json: bool) -> None:
    """Query until Ctrl-C; show transient errors of the batch system below the last table."""
    survey = chosen.source.survey()
    try:
        if json:
            while True:
                say_json(window_rows(survey), indent=None)
                time.sleep(interval)
                survey = chosen.source.survey()
        console = Screen()
        with Live(window_view(survey, chosen.title, console.width), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    survey = chosen.source.survey()
                    shown = survey
                except BatchSystemError as error:
                    if not error.transient:
                        raise
                    shown = replace(survey, notes=(*survey.notes, f"{time.strftime('%H:%M:%S')}: {error}"))
                live.update(window_view(shown, chosen.title, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def window_rows(survey: Survey) -> list[dict[str, object]]:
    """Describe the windows for JSON; times are seconds since the epoch, ``None`` for unknown."""
    return [window_row(window) for window in survey.windows]


def window_row(window: Window) -> dict[str, object]:
    """Describe a window for JSON."""
    return {
        "nodes": len(window.nodes),
        "node_names": list(window.nodes),
        "opens": window.opens,
        "closes": window.closes,
        "kind": window.kind.value,
        "partition": window.partition,
        **({"node_kind": window.node_kind} if window.node_kind else {}),
    }


def window_view(survey: Survey, title: str, width: int) -> Group:
    """Draw the windows, and below them the assumptions, for a terminal of `width` columns."""
    when = time.strftime("%H:%M:%S", time.localtime(survey.time))
    total = sum(len(window.nodes) for window in survey.windows)
    head = Text(f"{title}: {total or 'no'} idle node{'' if total == 1 else 's'} at {when}")
    return Group(head, *([window_table(survey, narrow=width < NARROW)] if total else []), *notes_view(survey.notes))


def notes_view(notes: Iterable[str]) -> list[Text]:
    """Draw notes, one per line."""
    return [Text(f"note: {note}", style="dim") for note in notes]


def window_table(survey: Survey, *, narrow: bool = False) -> Table:
    """Draw the windows, largest first; each shows how many nodes are free for at least as long."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("nodes", justify="right")
    kinds = any(window.node_kind for window in survey.windows)
    if kinds:
        table.add_column("of kind", no_wrap=True)
    table.add_column("time left", justify="right", no_wrap=True)
    table.add_column("for as long", justify="right")
    table.add_column("closes", no_wrap=True)
    if not narrow:
        table.add_column("idle for", justify="right", no_wrap=True)
        table.add_column("kind", no_wrap=True)
    table.add_column("names", overflow="fold")
    for window in survey.windows:
        left = window.remaining(survey.time)
        as_long = sum(
            len(other.nodes)
            for other in survey.windows
            if other.node_kind == window.node_kind and other.remaining(survey.time) >= left
        )
        table.add_row(
            str(len(window.nodes)),
            *([window.node_kind] if kinds else []),
            "" if window.closes is None else format_duration(left),
            str(as_long),
            format_closing(window, survey.time),
            *([] if narrow else [format_duration(survey.time - window.opens), window.kind.value]),
            format_hosts(window.nodes),
        )
    return table


def format_closing(window: Window, now: float) -> str:
    """Format when a window closes: a time of day, with the date if it is more than a day away."""
    if window.closes is None:
        return "not planned" if window.kind is WindowKind.BACKFILL else "any time"
    near = abs(window.closes - now) < 86400
    return time.strftime("%H:%M:%S" if near else "%Y-%m-%d %H:%M", time.localtime(window.closes))


def format_hosts(names: Iterable[str]) -> Text:
    """Format names as a host list; a narrow terminal may break the line after a comma."""
    return Text(show_hosts(names).replace(",", ", ").rstrip(), overflow="fold")


def format_duration(seconds: float) -> str:
    """Format a duration as ``[days-]H:MM:SS``."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"
