"""``freetrain stop``, ``cancel`` and ``clean``: end a run, one training job, or what a dead driver has left."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from freetrain_parsl.campaign.directories import find_run, kind_of
from freetrain_parsl.campaign.lock import DriverState, driver_lock, driver_state
from freetrain_parsl.campaign.orphans import remove_orphans, remove_start_files
from freetrain_parsl.campaign.run import read_site, refuse_living_driver
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.summary import driver_line
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.run_directory import RunDirectory
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.screen import say

__all__ = ["cancel", "clean", "stop"]

_PERIOD = 0.5  # polling interval, seconds


def stop(
    run_dir: RunDirectory = None,
    timeout: float = typer.Option(120.0, metavar="SECONDS", min=0, help="How long to wait for the driver to end."),
) -> None:
    """Ask the driver to save all training jobs, cancel its batch jobs and exit; wait until it has."""
    console = Screen()
    with errors_in_one_line("stop"):
        store = RunStore(find_run(run_dir).absolute())
        if driver_state(store.last_driver()) is DriverState.ALIVE:
            store.request_stop()
            end = time.monotonic() + timeout
            with console.status("waiting for the driver: training jobs save their work, batch jobs are cancelled"):
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


def cancel(
    run_dir: Path = typer.Argument(metavar="RUN_DIR", help="Run directory."),
    name: str = typer.Argument(metavar="NAME", help="Name of the training job, as in freetrain status."),
    timeout: float = typer.Option(120.0, metavar="SECONDS", min=0, help="How long to wait for it to end."),
) -> None:
    """Cancel one training job: its state is saved, its nodes go to the others, and resume skips it unless named."""
    console = Screen()
    with errors_in_one_line("cancel"):
        store = RunStore(run_dir.absolute())
        store.request_cancel(name)
        if driver_state(store.last_driver()) is not DriverState.ALIVE:
            store.cancel(name)
        end = time.monotonic() + timeout
        with console.status("waiting for the training job: it saves its state"):
            while (training := store.training(name)).state in ("waiting", "running"):
                if driver_state(store.last_driver()) is not DriverState.ALIVE:
                    store.cancel(name)
                elif time.monotonic() > end:
                    console.say(f"{name} did not stop within {timeout:g} s")
                    raise typer.Exit(1)
                else:
                    time.sleep(_PERIOD)
        if training.state != "cancelled":
            console.say(f"{name} had already ended: {training.state}")
            raise typer.Exit(1)
        console.say(
            f"{name} is cancelled; its checkpoints are kept. To continue it: freetrain resume {store.directory} "
            f"--retry {name}",
        )


def clean(run_dir: RunDirectory = None) -> None:
    """Cancel the remaining jobs and copies of a run without a driver; its files and checkpoints are kept."""
    with errors_in_one_line("clean"):
        store = RunStore(find_run(run_dir).absolute())
        refuse_living_driver(store)
        with driver_lock(store.directory):
            site = read_site(store)
            orphans = remove_orphans(site, store, say)
            remove_start_files(store)
            if site.home is not None:
                site.home.clean(store, say)
        say(f"cancelled {len(orphans)} remaining jobs" if orphans else "no remaining jobs")
