"""Print a table of results with the measurement environment; write the same rows as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def report(
    title: str, rows: Sequence[Mapping[str, Any]], packages: Sequence[str], json_file: Path | None = None
) -> None:
    """Print rows below machine, versions and command, a table for each kind; write them as JSON if requested."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(f"[bold]{title}[/bold]")
    console.print(f"machine   {machine()}, load {os.getloadavg()[0]:.1f}")
    console.print(f"versions  Python {platform.python_version()}, {', '.join(map(_version, packages))}")
    console.print(f"command   {' '.join([Path(sys.executable).name, *sys.argv])}")
    for keys, alike in groupby(rows, key=tuple):
        table = Table()
        for key in keys:
            table.add_column(key.replace("_", " "), justify="right")
        for row in alike:
            table.add_row(*(_cell(value) for value in row.values()))
        console.print(table)
    if json_file is not None:
        write_output(json_file, json.dumps(list(rows), indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def machine() -> str:
    """Return the processor and the number of its cores."""
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
