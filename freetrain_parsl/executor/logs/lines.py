"""The lines of a training's log, and the files that they are in.

A line has the time at which it reached the driver, the process that printed it, and its text::

    2026-11-23T01:45:16.123Z = trains on n03, n04
    2026-11-23T01:45:17.201Z 0 epoch 3, loss 0.1203

The process is its rank, ``?`` while it joins a running training, with ``!`` if the line belongs to the exception that
ended it there, and ``=`` for a mark: what became of the training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from freetrain_parsl.texts import with_colours_only

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FIRST", "MARK", "SUFFIX", "LogLine", "as_text", "log_files", "names_in", "parse_line"]

MARK: Final = "="
FIRST: Final = "0"

SUFFIX: Final = ".log"
"""Of the newest file of a training's log; older ones have a number after it, the largest is the oldest."""

_FILE = re.compile(rf"(.+){re.escape(SUFFIX)}(?:\.(\d+))?", re.ASCII)  # the current one has no number
_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (=|!?\d{1,7}|!?\?) (.*)", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class LogLine:
    """One line of a training's log: when it reached the driver, and the process that printed it, or `MARK`."""

    time: float
    training: str
    source: str
    text: str

    @property
    def is_mark(self) -> bool:
        """Whether it says what became of the training, instead of what it printed."""
        return self.source == MARK

    @property
    def is_main(self) -> bool:
        """Whether it belongs to the training's main output: the first process's, marks, and exceptions."""
        return self.source in (FIRST, MARK) or self.source.startswith("!")


def as_text(time: float, source: str, text: str) -> str:
    """Return one line or several as they are in the file; control characters other than tabs and colours are left out.

    What UTF-8 cannot encode, such as the bytes of a file name in an exception, is escaped.
    """
    stamp = datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="milliseconds")[:-6]
    prefix = f"{stamp}Z {source} "
    shown = with_colours_only(text)
    return prefix + shown.replace("\n", f"\n{prefix}") + "\n"


def parse_line(training: str, line: str) -> LogLine | None:
    """Return a line of a file; ``None`` if it is not one, e.g. because the driver was killed while it wrote it."""
    if (found := _LINE.fullmatch(line.removesuffix("\n"))) is None:
        return None
    stamp, source, text = found.groups()
    try:
        time = datetime.fromisoformat(f"{stamp}+00:00").timestamp()
    except ValueError:
        return None
    return LogLine(time, training, source, text)


def log_files(directory: Path) -> dict[str, list[Path]]:
    """Return the files of each training's log, oldest first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in directory.glob(f"*{SUFFIX}*"):
        if (name := _FILE.fullmatch(path.name)) is not None:
            found.setdefault(name[1], []).append((int(name[2] or 0), path))
    return {training: [path for _, path in sorted(numbered, reverse=True)] for training, numbered in found.items()}


def names_in(directory: Path) -> list[str]:
    """Return the trainings that have a log in a directory."""
    return sorted({path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}")})
