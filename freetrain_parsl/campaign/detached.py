"""The driver of a run as a detached process, on this host: it outlives the shell or the notebook that starts it.

Its files are in ``driver/`` of the run directory; see `launch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.campaign.launch import launch, process_of
from freetrain_parsl.campaign.run import DRIVER
from freetrain_parsl.extensions.globus.remote.verbs import status_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.campaign.launch import Process
    from freetrain_parsl.campaign.stored_run import StoredRun
    from freetrain_parsl.extensions.globus.remote.messages import RemoteStatus

__all__ = ["drive_detached", "driver_process", "local_status", "run_detached"]


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


def local_status(run_dir: Path, store: StoredRun | None) -> RemoteStatus:
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
