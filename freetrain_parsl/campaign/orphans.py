"""What a killed driver has left: jobs in the queue, which are found by their names, and files for starts of nodes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.site.providers import make_window_source
from freetrain_parsl.errors import BatchSystemError, ClusterGone
from freetrain_parsl.executor.htex.node_start import START_FILES
from freetrain_parsl.training.data.staging import COPIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.campaign.store import RunStore
    from freetrain_parsl.windows.base import WindowSource

__all__ = ["remove_orphans", "remove_start_files"]

_PERIODS = (2.0, 15.0)  # seconds between polls of cancelled jobs: at first, and at most
_PATIENCE = 300.0  # a job that saves its work ends within its grace period


def remove_orphans(
    site: Site,
    store: RunStore,
    report: Callable[[str], None],
    *,
    make_source: Callable[[Site], WindowSource] = make_window_source,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """Cancel the jobs that earlier drivers of a run have left, and wait until they are gone.

    Parameters
    ----------
    site
        Where they were submitted.
    store
        Has the prefixes of their names.
    report
        Called with a line of output for each action.

    Returns
    -------
    dict of str to str
        Job id -> name of the cancelled jobs.

    Raises
    ------
    InvalidInput
        A prefix is not that of jobs of this run; none is cancelled.
    BatchSystemError
        The batch system does not respond, or the jobs do not end.
    """
    prefixes = store.job_prefixes()
    if not prefixes or not site.outlives_driver:
        return {}
    try:
        source = make_source(site)
    except ClusterGone:
        report("the cluster of this run is gone, and all jobs with it")
        return {}
    orphans = _find(source, prefixes)
    if not orphans:
        return {}
    report(f"cancelling jobs left in the queue: {', '.join(f'{job} ({name})' for job, name in orphans.items())}")
    source.cancel(list(orphans))
    end, (period, longest) = clock() + _PATIENCE, _PERIODS
    while left := _find(source, prefixes):
        if clock() > end:
            raise BatchSystemError(
                f"jobs {', '.join(left)} were cancelled and are still there after {_PATIENCE:.0f} s; "
                "ask the site's administrators"
            )
        sleep(period)
        period = min(2 * period, longest)
    return orphans


def remove_start_files(store: RunStore) -> None:
    """Remove what the nodes of a run have read when they started: tens of MB for each driver that was killed."""
    for driver in store.drivers():
        if driver.journal is not None:
            shutil.rmtree(Path(driver.journal).parent / START_FILES, ignore_errors=True)
    for copies in COPIES.usable():  # of users' files: where nodes are on this host, as in the embedded cluster
        copies.clean()


def _find(source: WindowSource, prefixes: list[str]) -> dict[str, str]:
    """Return the jobs with these prefixes, whatever the batch system's own filter lets through."""
    found = {job: name for prefix in prefixes for job, name in source.find_jobs(prefix).items()}
    return {job: name for job, name in found.items() if name.startswith(tuple(prefixes))}
