"""``freetrain clean``: ends the jobs that a dead driver has left in the queue."""

from __future__ import annotations

import typer

from freetrain_parsl.campaign.lock import driver_lock
from freetrain_parsl.campaign.orphans import remove_orphans
from freetrain_parsl.campaign.run import find_run, read_site, refuse_living_driver
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.campaign_view import RunDirectory
from freetrain_parsl.cli.sources import errors_in_one_line

__all__ = ["clean"]


def clean(run_dir: RunDirectory = None) -> None:
    """End jobs of a run that nobody drives any more; its files and checkpoints stay."""
    with errors_in_one_line("clean"):
        store = RunStore(find_run(run_dir).absolute())
        refuse_living_driver(store)
        with driver_lock(store.directory):
            orphans = remove_orphans(read_site(store), store, typer.echo)
        typer.echo(f"{len(orphans)} jobs were left and are ended now" if orphans else "no job was left")
