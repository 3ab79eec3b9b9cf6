"""``freetrain status``: shows the state of a campaign, from any shell."""

from __future__ import annotations

import json as json_format

import typer
from rich.console import Console

from freetrain_parsl.campaign.run_source import ScriptSource
from freetrain_parsl.campaign.stored_run import StoredRun
from freetrain_parsl.campaign.summary import (
    driver_line,
    failures_line,
    failures_of,
    home_lines,
    reasons_of,
    summary,
    trainings_of,
)
from freetrain_parsl.cli.campaign_view import print_trainings
from freetrain_parsl.cli.run_directory import RunDirectory, open_run
from freetrain_parsl.cli.script_view import print_script, script_figures
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.remote.sites.coordinator_file import site_lines

__all__ = ["status"]


def status(
    run_dir: RunDirectory = None,
    json: bool = typer.Option(False, "--json", help="Print a JSON object instead of a table."),
) -> None:
    """Show the trainings of a run, and whether its driver is alive."""
    with errors_in_one_line("status"):
        source = open_run(run_dir)
        if isinstance(source, ScriptSource):
            if json:
                typer.echo(json_format.dumps(script_figures(source), indent=2))
            else:
                print_script(Console(), source)
            return
        store = StoredRun(source.directory)
        sites = None if store.fact("sites", None) is None else site_lines(store.directory)
        if json:
            typer.echo(json_format.dumps({**summary(store), **({} if sites is None else {"sites": sites})}, indent=2))
            return
        trainings = trainings_of(store)
        console = Console()
        finished = sum(item.state == "finished" for item in trainings)
        console.print(
            f"{store.fact('name')}: {finished} of {len(trainings)} trainings finished, in {store.directory}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        console.print(driver_line(store), highlight=False, soft_wrap=True)
        for line in reasons_of(store):
            console.print(line, highlight=False, markup=False, soft_wrap=True, style="bold")
        if failures := failures_line(failures_of(store)):
            console.print(
                f"{failures}: freetrain dashboard {store.directory} lists them",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        for line in sites or ():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        print_trainings(console, trainings)
        for line in home_lines(store):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
