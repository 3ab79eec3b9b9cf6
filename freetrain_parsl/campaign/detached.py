"""The driver of a run as a detached process, on this host: it outlives the shell or the notebook that starts it.

Its files are in ``driver/`` of the run directory; see `launch`.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.directories import DRIVER
from freetrain_parsl.campaign.launch import last_line, launch, process_of
from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.summary import summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.campaign.launch import Process
    from freetrain_parsl.campaign.stored_run import StoredRun

__all__ = ["RunStatus", "drive_detached", "driver_process", "local_status", "run_detached", "status_of"]

_LONGEST_START = 900.0  # seconds until a driver has registered
_OVER = ("finished", "stopped", "interrupted", "failed", "died")


@dataclass(frozen=True)
class RunStatus:
    """State of a run that a detached process drives.

    Parameters
    ----------
    run
        Name of the run.
    state
        ``starting``, ``running``, ``stopping``; or over: ``finished``, ``stopped``, ``interrupted``, ``failed`` (the
        driver could not start, or training jobs failed), ``died`` (it was killed, or its host rebooted).
    host
        Login node of the driver.
    directory
        Directory of the run.
    message
        What the user should know, such as why it failed; one line.
    summary
        As of ``freetrain status --json``; ``None`` before the driver has started.
    """

    run: str
    state: str
    host: str
    directory: str
    message: str = ""
    summary: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def over(self) -> bool:
        """Whether no driver runs, or will run without a `resume`."""
        return self.state in _OVER

    def as_json(self) -> dict[str, Any]:
        """Describe it for a message and for ``--json``."""
        return asdict(self)


def drive_detached(run_dir: Path, *, config: Path | None = None, on_code_change: str | None = None) -> None:
    """Start the driver of a run that exists, and return once its process has recorded itself.

    Parameters
    ----------
    run_dir
        The run directory, absolute.
    config, on_code_change
        As of ``freetrain resume``.
    """
    command = ["resume", str(run_dir)]
    if config is not None:
        command += ["--config", str(config)]
    if on_code_change is not None:
        command += ["--on-code-change", on_code_change]
    run_detached(run_dir, command, Path.cwd(), os.environ)


def run_detached(run_dir: Path, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
    """Start the process that drives a run, and return once it has recorded itself.

    Parameters
    ----------
    run_dir
        The run directory, absolute. It exists; ``freetrain run`` may yet have to create the run in it.
    command
        Arguments of ``freetrain``.
    directory, environment
        Where it runs, and with which variables.
    """
    files = run_dir / DRIVER
    files.mkdir(mode=0o700, exist_ok=True)
    launch(files, command, directory, environment)


def driver_process(run_dir: Path) -> Process | None:
    """Return the last detached process of a run; ``None``: there was none."""
    return process_of(run_dir / DRIVER)


def local_status(run_dir: Path, store: StoredRun | None) -> RunStatus:
    """Return the state of a run on this host: of its detached process if it has one, else of its last driver.

    It has no summary, so that it can be asked for every second.

    Parameters
    ----------
    run_dir
        The run directory.
    store
        Its state; ``None``: the run has not been created yet, or was refused.
    """
    directory = run_dir / DRIVER
    return status_of(directory, process_of(directory), store, with_summary=False)


def status_of(
    root: Path,
    process: Process | None,
    store: StoredRun | None,
    clock: Callable[[], float] = time.time,
    *,
    with_summary: bool = True,
) -> RunStatus:
    """Derive the state of a run from its last process and its store.

    Parameters
    ----------
    root
        Directory of the run.
    process
        The last detached process.
    store
        State of the run; ``None`` before it has been created.
    clock
        Seconds since the epoch.
    with_summary
        Whether the status has the summary, with all training jobs.
    """
    driver = None if store is None else store.last_driver()
    document = summary(store) if store is not None and with_summary else None
    host = driver.host if driver is not None else process.host if process is not None else platform.node()
    status = RunStatus(root.name, "starting", host, str(root), summary=document)
    drives = process is not None and process.command[0] in ("run", "resume")
    if drives and process is not None and (driver is None or driver.since < process.since):
        # The process has not become the driver (yet).
        # On another login node it cannot be seen; there it may have ended with its host.
        may_run = clock() - process.since < _LONGEST_START if process.running is None else process.running
        if process.exit_code is None and may_run:
            return status
        return replace(status, state="failed", message=last_line(root))
    if driver is None or store is None:
        return replace(status, state="failed", message="it was not started; start it again")
    match driver_state(driver):
        case DriverState.ALIVE:
            return replace(status, state="stopping" if store.stop_requested() else "running")
        case DriverState.DEAD:
            return replace(
                status, state="died", message="its driver was killed, or its host rebooted; resume continues"
            )
        case _:
            trainings = store.trainings()
            left, total = sum(item.state not in ("finished", "cancelled") for item in trainings), len(trainings)
            if driver.how == "finished" and left:
                return replace(
                    status, state="failed", message=f"{left} of {total} training jobs have not finished; see results"
                )
            return replace(status, state=driver.how or "failed")
