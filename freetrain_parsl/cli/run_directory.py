"""The argument that names a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = ["RunDirectory"]

RunDirectory: TypeAlias = Annotated[
    Path | None, typer.Argument(metavar="[RUN_DIR]", help="Run directory. Default: newest in the current directory.")
]
