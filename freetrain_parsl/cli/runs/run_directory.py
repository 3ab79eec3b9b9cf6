"""The argument that names a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from freetrain_parsl.campaign.directories import find_run
from freetrain_parsl.campaign.run_source import RunSource, open_source
from freetrain_parsl.screen import say

__all__ = ["RunDirectory", "open_run"]

RunDirectory: TypeAlias = Annotated[
    Path | None, typer.Argument(metavar="[RUN_DIR]", help="Run directory. Default: newest in the current directory.")
]


def open_run(run_dir: Path | None) -> RunSource:
    """Open a run for reading, by default the newest one of this user's here; say on stderr if it may be of others."""
    run = open_source(find_run(run_dir).absolute())
    for line in run.notes:
        say(line, err=True)
    return run
