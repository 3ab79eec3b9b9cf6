"""The driver of a run as a detached process, on this host: it outlives the shell or the notebook that starts it.

Its files are in ``driver/`` of the run directory; see `launch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.remote.launch import launch, process_of
from freetrain_parsl.remote.verbs import status_of

if TYPE_CHECKING:
    from freetrain_parsl.campaign.store import RunStore
    from freetrain_parsl.remote.messages import RemoteStatus

__all__ = ["DRIVER", "drive_detached", "local_status"]

DRIVER = "driver"
"""Directory of the process' files, in the run directory."""


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
    directory = run_dir / DRIVER
    directory.mkdir(mode=0o700, exist_ok=True)
    launch(directory, command, Path.cwd(), os.environ)


def local_status(store: RunStore) -> RemoteStatus:
    """Return the state of a run on this host: of its detached process if it has one, else of its last driver.

    It has no summary, so that it can be asked for every second.
    """
    directory = store.directory / DRIVER
    return status_of(directory, process_of(directory), store, with_summary=False)
