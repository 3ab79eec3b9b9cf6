"""``freetrain cancel``: ends one training of a campaign, from any shell, and keeps its checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.sources import errors_in_one_line

__all__ = ["cancel"]

_PERIOD = 0.5  # polling interval, seconds


def cancel(
    run_dir: Path = typer.Argument(metavar="RUN_DIR", help="Run directory."),
    name: str = typer.Argument(metavar="NAME", help="Name of the training, as in freetrain status."),
    timeout: float = typer.Option(120.0, metavar="SECONDS", min=0, help="How long to wait for it to end."),
) -> None:
    """Cancel one training: its state is saved, its nodes go to the others, and resume skips it unless named."""
    console = Screen()
    with errors_in_one_line("cancel"):
        store = RunStore(run_dir.absolute())
        store.request_cancel(name)
        if driver_state(store.last_driver()) is not DriverState.ALIVE:
            store.cancel(name)
        end = time.monotonic() + timeout
        with console.status("waiting for the training: it saves its state"):
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
