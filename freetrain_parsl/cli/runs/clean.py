"""``freetrain clean``: cancels the jobs and copies that a dead driver has left."""

from __future__ import annotations

from freetrain_parsl.campaign.directories import find_run
from freetrain_parsl.campaign.lock import driver_lock
from freetrain_parsl.campaign.orphans import remove_orphans
from freetrain_parsl.campaign.run import read_site, refuse_living_driver
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.runs.run_directory import RunDirectory
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.screen import say

__all__ = ["clean"]


def clean(run_dir: RunDirectory = None) -> None:
    """Cancel the remaining jobs and copies of a run without a driver; its files and checkpoints are kept."""
    with errors_in_one_line("clean"):
        store = RunStore(find_run(run_dir).absolute())
        refuse_living_driver(store)
        with driver_lock(store.directory):
            site = read_site(store)
            orphans = remove_orphans(site, store, say)
            if site.home is not None:
                site.home.clean(store, say)
        say(f"cancelled {len(orphans)} remaining jobs" if orphans else "no remaining jobs")
