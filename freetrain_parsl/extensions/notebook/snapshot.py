"""The state of a run at one time, as text and as HTML that any viewer of notebooks can show."""

from __future__ import annotations

import html
import time
from dataclasses import dataclass
from pathlib import Path

from freetrain_parsl.texts import printable, shortened

__all__ = ["RunSnapshot", "TrainingRow", "short_path"]

_MOST_ROWS = 100  # training jobs that are shown
_COLUMNS = ("training", "state", "done", "epoch", "loss", "nodes, result, or why not")
_LONGEST_NOTE = 200


def short_path(path: Path) -> str:
    """Return a path relative to the current directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@dataclass(frozen=True)
class TrainingRow:
    """What is shown of one training job.

    Parameters
    ----------
    state
        ``waiting``, ``running``, ``finished``, ``failed`` or ``cancelled``.
    share
        Fraction of its samples that is done; ``None`` while the total is unknown.
    epoch, loss
        Of its last progress report.
    note
        Its nodes, its result, its error, or why it waits.
    """

    name: str
    state: str
    share: float | None = None
    epoch: int | None = None
    loss: float | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the texts of its columns."""
        note = shortened(self.note, _LONGEST_NOTE)
        return (
            shortened(self.name),
            self.state,
            "" if self.share is None else f"{self.share:.0%}",
            "" if self.epoch is None else str(self.epoch),
            "" if self.loss is None else f"{self.loss:.4f}",
            note,
        )


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run; `place` is its directory, as it is shown, and `notes` what else a user should know."""

    title: str
    state: str
    place: str
    rows: tuple[TrainingRow, ...]
    taken: float
    notes: tuple[str, ...] = ()
    over: bool = False

    def head(self) -> str:
        """Describe the run in one line."""
        finished = sum(row.state == "finished" for row in self.rows)
        failed = sum(row.state == "failed" for row in self.rows)
        parts = [f"{shortened(self.title)}: {self.state}", f"{finished} of {len(self.rows)} training jobs finished"]
        if failed:
            parts.append(f"{failed} failed")
        parts += [f"in {self.place}", f"at {time.strftime('%H:%M:%S', time.localtime(self.taken))}"]
        return printable(", ".join(parts))

    def text(self) -> str:
        """Return the state as a table of text."""
        table = [_COLUMNS, *self._cells()]
        widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table)
        lines = ["  ".join(row).rstrip() for row in padded]
        return "\n".join([self.head(), *map(printable, self.notes), *lines, *self._rest()])

    def html(self) -> str:
        """Return the state as an HTML table, without scripts and style sheets: viewers remove them."""
        left = "style='text-align:left'"
        heads = "".join(f"<th {left}>{html.escape(name)}</th>" for name in _COLUMNS)
        rows = "".join(
            "<tr>" + "".join(f"<td {left}>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._cells()
        )
        notes = "".join(f"<p>{html.escape(printable(note))}</p>" for note in (*self.notes, *self._rest()))
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<div><p><b>{html.escape(self.head())}</b></p>{table}{notes}</div>"

    def _cells(self) -> list[tuple[str, ...]]:
        return [row.cells() for row in self.rows[:_MOST_ROWS]]

    def _rest(self) -> list[str]:
        left = len(self.rows) - _MOST_ROWS
        return [f"… and {left} more; results() has all"] if left > 0 else []
