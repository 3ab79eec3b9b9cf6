"""``freetrain stop``: saves and ends a campaign, from any shell."""

from __future__ import annotations

import time

import typer

from freetrain_parsl.campaign.directories import find_run, kind_of
from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.summary import driver_line
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.run_directory import RunDirectory
from freetrain_parsl.cli.sources import errors_in_one_line

__all__ = ["stop"]

_PERIOD = 0.5  # polling interval, seconds


def stop(
    run_dir: RunDirectory = None,
    timeout: float = typer.Option(120.0, metavar="SECONDS", min=0, help="How long to wait for the driver to end."),
) -> None:
    """Ask the driver to save all trainings, withdraw its jobs and end; wait until it has."""
    console = Screen()
    with errors_in_one_line("stop"):
        store = RunStore(find_run(run_dir).absolute())
        if driver_state(store.last_driver()) is DriverState.ALIVE:
            store.request_stop()
            end = time.monotonic() + timeout
            with console.status("waiting for the driver: trainings save their work, jobs are withdrawn"):
                while driver_state(store.last_driver()) is DriverState.ALIVE:
                    if time.monotonic() > end:
                        console.say(f"the driver did not stop within {timeout:g} s")
                        raise typer.Exit(1)
                    time.sleep(_PERIOD)
        elif (kind := kind_of(store)) is not None:
            kind.stop(store.directory)
        console.say(driver_line(store))
        if driver_state(store.last_driver()) is DriverState.DEAD:
            console.say(f"to cancel jobs that it may have left: freetrain clean {store.directory}")
            raise typer.Exit(1)
