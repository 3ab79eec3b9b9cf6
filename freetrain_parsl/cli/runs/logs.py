"""``freetrain logs``: shows what the training jobs of a run have printed, wherever they ran."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from freetrain_parsl.campaign.logs import LOGS, log_lines, name_width, shown_line, trainings_of
from freetrain_parsl.campaign.stored_run import DATABASE
from freetrain_parsl.cli.runs.run_directory import RunDirectory, open_run
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.screen import say_coloured

__all__ = ["logs"]


def logs(
    run_dir: RunDirectory = None,
    training: Annotated[
        str | None, typer.Argument(metavar="[TRAINING]", help="Name of the training job. Default: all, merged by time.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show further lines until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Show the last N lines only.")
    ] = None,
    all_processes: Annotated[
        bool, typer.Option("--all", help="Show the output of all processes, with their ranks, not just the first's.")
    ] = False,
    times: Annotated[bool, typer.Option("--times", help="Show when each line arrived.")] = False,
) -> None:
    """Show what the training jobs of a run have printed, in order, with marks where they moved."""
    with errors_in_one_line("logs"):
        if run_dir is None or (run_dir / DATABASE).exists() or not (run_dir / LOGS).is_dir():
            run_dir = open_run(run_dir).directory  # of a directory above Parsl's, such as the demo's
        names = [] if training is not None else trainings_of(run_dir)
        width = name_width(names)
        try:
            for line in log_lines(run_dir, training, follow=follow, tail=tail, all_processes=all_processes):
                say_coloured(shown_line(line, width, all_processes=all_processes, times=times), flush=follow)
            sys.stdout.flush()
        except BrokenPipeError:  # `freetrain logs … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
