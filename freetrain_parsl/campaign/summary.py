"""The state of a run as a document, and in one line; for any shell, and for other hosts."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.site.home import HOME_KINDS
from freetrain_parsl.report.projection.incidents import count_failures
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.report.run_reader import DAMAGED

if TYPE_CHECKING:
    from freetrain_parsl.campaign.stored_run import StoredRun, TrainingRecord

__all__ = [
    "ago",
    "driver_line",
    "failures_line",
    "failures_of",
    "home_lines",
    "journal_state_of",
    "reasons_of",
    "summary",
    "trainings_of",
]


def trainings_of(store: StoredRun) -> list[TrainingRecord]:
    """Return the current training jobs; those of a dead driver wait for a resume, and for nothing else."""
    trainings = store.trainings()
    if driver_state(store.last_driver()) is not DriverState.DEAD:
        return trainings
    return [
        replace(item, state="waiting", nodes=(), where="", remark=None)
        if item.state in ("waiting", "running")
        else item
        for item in trainings
    ]


def summary(store: StoredRun) -> dict[str, Any]:
    """Describe a run for ``--json``; times are seconds since the epoch."""
    driver = store.last_driver()
    trainings = trainings_of(store)
    run = journal_state_of(store, with_reasons_only=True)
    return {
        "name": store.fact("name"),
        "run_dir": str(store.directory),
        "run_id": store.fact("run_id"),
        "created": store.fact("created"),
        "site_file": store.fact("site_file"),
        "campaign_file": store.fact("campaign_file"),
        "driver": None
        if driver is None
        else {
            "state": driver_state(driver).name.lower(),
            "how": driver.how,
            "host": driver.host,
            "pid": driver.pid,
            "since": driver.since,
            "heartbeat": driver.heartbeat,
            "ended": driver.ended,
            "journal": driver.journal,
        },
        "failed_starts": None if run is None or run.failed_starts is None else asdict(run.failed_starts),
        "failures": failures_of(store),
        "reasons": [] if run is None else run.reasons(time.time()),
        "home": home_lines(store),
        "finished": sum(item.state == "finished" for item in trainings),
        "failed": sum(item.state == "failed" for item in trainings),
        "cancelled": sum(item.state == "cancelled" for item in trainings),
        "trainings": [item.as_json() for item in trainings],
    }


def home_lines(store: StoredRun) -> list[str]:
    """Return what the living driver's home is doing."""
    if driver_state(store.last_driver()) is not DriverState.ALIVE:
        return []
    return [line for kind in HOME_KINDS.usable() for line in kind.lines(store.directory)]


def ago(seconds: float) -> str:
    """Format an age in a readable unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def failures_of(store: StoredRun) -> int | None:
    """Return the number of failures of the run so far; ``None`` if a journal cannot be read here."""
    journals = (Path(driver.journal) for driver in store.drivers() if driver.journal is not None)
    try:
        return count_failures(path for path in journals if path.exists())
    except (OSError, sqlite3.Error, *DAMAGED):  # as in `journal_state_of`; or it is damaged, which the report says
        return None


def reasons_of(store: StoredRun) -> list[str]:
    """Return what keeps the waiting training jobs of the living driver from nodes, see `RunState.reasons`."""
    run = journal_state_of(store, with_reasons_only=True)
    return [] if run is None else run.reasons(time.time())


def failures_line(number: int | None) -> str:
    """Say how many failures a run has had so far; empty if there was none, or if that is unknown."""
    return "" if not number else "1 failure so far" if number == 1 else f"{number:,} failures so far"


def journal_state_of(store: StoredRun, *, with_reasons_only: bool = False) -> RunState | None:
    """Return what the journal of the living driver says; ``None`` without such a driver, or if it cannot be read.

    Parameters
    ----------
    store
        The run.
    with_reasons_only
        Read only what `RunState.with_reasons` reads.
    """
    driver = store.last_driver()
    if driver is None or driver.journal is None or driver_state(driver) is not DriverState.ALIVE:
        return None
    journal = Path(driver.journal)
    try:
        return RunState.with_reasons(journal) if with_reasons_only else RunState(journal).refresh()
    except (sqlite3.Error, *DAMAGED):  # the write-ahead log of another host cannot be read here
        return None


def driver_line(store: StoredRun, clock: float | None = None) -> str:
    """Describe the state of a run's driver in one line."""
    driver = store.last_driver()
    state = driver_state(driver)
    if driver is None:
        return f"no driver has run yet; one may be starting. If not: freetrain resume {store.directory}"
    now = time.time() if clock is None else clock
    who = f"driver on {driver.host}, process {driver.pid},"
    if driver.ended is not None:
        return f"{who} {state.value} ({driver.how}) {ago(now - driver.ended)}"
    last = f"last heartbeat {ago(now - driver.heartbeat)}"
    hint = "" if state is DriverState.ALIVE else f"; to continue: freetrain resume {store.directory}"
    return f"{who} {state.value}; {last}{hint}"
