"""What the commands that compute figures share: checks of options, progress bars, and output files."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.errors import InvalidSettings, UsageError, did_you_mean
from freetrain_parsl.report.output import write_output

__all__ = [
    "check_targets",
    "choice",
    "known_name",
    "on_progress_of",
    "progress_bars",
    "split_names",
    "write_json",
    "write_outputs",
]

_Choice = TypeVar("_Choice", bound=Enum)


def check_targets(inputs: Sequence[Path], targets: Mapping[str, Path | None]) -> None:
    """Reject output files that cannot be written, before the work starts."""
    taken = {file.resolve(): "an input" for file in inputs}
    for option, file in targets.items():
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise UsageError(f"{option} {file}: there is no directory {folder}; create it, or choose another")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise UsageError(f"{option} {file}: cannot be written; choose another file")
        if (other := taken.setdefault(file.resolve(), option)) != option:
            raise UsageError(f"{option} {file}: this is {other} already; choose another file")


def split_names(option: str, text: str) -> list[str]:
    """Split a list of names, without duplicates."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidSettings(f"{option}: no name in {text!r}")
    return list(dict.fromkeys(names))


def known_name(option: str, name: str, known: Iterable[str]) -> str:
    """Return a valid name; otherwise raise an error that lists the valid ones."""
    names = sorted(known)
    if name not in names:
        raise InvalidSettings(f"{option}: unknown {name!r}{did_you_mean(name, names)}; available: {', '.join(names)}")
    return name


def choice(option: str, name: str, kind: type[_Choice]) -> _Choice:
    """Return the member of this value; otherwise raise an error that lists the values."""
    return kind(known_name(option, name, (str(item.value) for item in kind)))


def progress_bars() -> Progress:
    """Make the progress bars, on standard error and only if it is a terminal."""
    console = Screen(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def on_progress_of(progress: Progress) -> Callable[[str, float], None]:
    """Return a callback that updates one progress bar per task; at 0 the bar is indeterminate."""
    tasks: dict[str, TaskID] = {}

    def advance(doing: str, share: float) -> None:
        if doing not in tasks:
            tasks[doing] = progress.add_task(doing, total=None)
        progress.update(tasks[doing], total=1.0 if share else None, completed=share)

    return advance


def write_outputs(
    result: Mapping[str, Any], *outputs: tuple[Path | None, Callable[[Mapping[str, Any], Path], None]]
) -> None:
    """Write the result to each file that was asked for, given with what writes it."""
    for file, write in outputs:
        if file is None:
            continue
        try:
            write(result, file)
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from error


def write_json(result: Mapping[str, Any], file: Path) -> None:
    """Write the result as JSON in one line."""
    text = json_format.dumps(result, allow_nan=False, separators=(",", ":"))
    write_output(file, f"{text}\n")
