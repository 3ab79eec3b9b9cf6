"""``freetrain windows``: which nodes are idle until when, as ``showbf`` told for Maui and Moab."""

from __future__ import annotations

import json as json_format
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from freetrain_parsl.cluster.client import ClusterClient
from freetrain_parsl.errors import FreeTrainError
from freetrain_parsl.windows.local import LocalWindowSource

if TYPE_CHECKING:
    from freetrain_parsl.windows.base import Survey


def windows(
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="Embedded cluster to ask, if several run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.2, metavar="SECONDS", help="Ask again this often, until Ctrl-C.")
    ] = None,
) -> None:
    """Show the windows of the embedded cluster that runs: how many nodes for how long."""
    console = Console()
    try:
        source = LocalWindowSource(ClusterClient(cluster))
        if json:
            console.print_json(json_format.dumps(window_rows(source.survey())))
        elif watch is None:
            console.print(window_table(source.survey()))
        else:
            with Live(window_table(source.survey()), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(watch)
                    live.update(window_table(source.survey()), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except FreeTrainError as error:
        Console(stderr=True).print(f"freetrain windows: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error


def window_rows(survey: Survey) -> list[dict[str, object]]:
    """Describe the windows for JSON; times are seconds since the epoch, ``None`` for unknown."""
    return [
        {
            "nodes": len(window.nodes),
            "node_names": list(window.nodes),
            "opens": window.opens,
            "closes": window.closes,
            "kind": window.kind.value,
            "partition": window.partition,
        }
        for window in survey.windows
    ]


def window_table(survey: Survey) -> Table:
    """Draw the windows, largest first."""
    total = sum(len(window.nodes) for window in survey.windows)
    when = time.strftime("%H:%M:%S", time.localtime(survey.time))
    table = Table(title=f"{total} idle nodes at {when}", title_justify="left")
    table.add_column("nodes", justify="right")
    table.add_column("time left", justify="right")
    table.add_column("closes")
    table.add_column("idle for", justify="right")
    table.add_column("kind")
    table.add_column("names", overflow="fold")
    for window in survey.windows:
        closes = window.closes
        table.add_row(
            str(len(window.nodes)),
            "no end known" if closes is None else format_duration(closes - survey.time),
            "" if closes is None else time.strftime("%H:%M:%S", time.localtime(closes)),
            format_duration(survey.time - window.opens),
            window.kind.value,
            ",".join(window.nodes),
        )
    return table


def format_duration(seconds: float) -> str:
    """Write a length of time as ``[days-]H:MM:SS``."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"
