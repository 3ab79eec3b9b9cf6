"""``freetrain status``: shows the state of a campaign, from any shell."""

from __future__ import annotations

from itertools import chain

import typer

from freetrain_parsl.campaign.directories import kind_of
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
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.campaign_view import print_trainings
from freetrain_parsl.cli.runs.run_directory import RunDirectory, open_run
from freetrain_parsl.cli.runs.script_view import print_script, script_figures
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.screen import say_json
from freetrain_parsl.texts import shortened

__all__ = ["status"]


def status(
    run_dir: RunDirectory = None,
    json: bool = typer.Option(False, "--json", help="Print a JSON object instead of a table."),
) -> None:
    """Show the training jobs of a run, and whether its driver is alive."""
    with errors_in_one_line("status"):
        source = open_run(run_dir)
        if isinstance(source, ScriptSource):
            if json:
                say_json(script_figures(source))
            else:
                print_script(Screen(), source)
            return
        store = StoredRun(source.directory)
        kind = kind_of(store)
        lines = {} if kind is None else {kind.name: kind.lines(store)}
        if json:
            say_json({**summary(store), **lines})
            return
        trainings = trainings_of(store)
        console = Screen()
        finished = sum(item.state == "finished" for item in trainings)
        console.say(
            f"{shortened(str(store.fact('name')))}: {finished} of {len(trainings)} training jobs finished, "
            f"in {store.directory}"
        )
        console.say(driver_line(store))
        for line in reasons_of(store):
            console.say(line, style="bold")
        if failures := failures_line(failures_of(store)):
            console.say(f"{failures}: freetrain dashboard {store.directory} lists them")
        for line in chain.from_iterable(lines.values()):
            console.say(line)
        print_trainings(console, trainings)
        for line in home_lines(store):
            console.say(line)
