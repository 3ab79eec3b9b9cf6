"""The values of a training that trackers receive: those of `session.log`, with their steps.

They are part of the training's state, the last ones: a process that becomes the first member, and a training that
resumes from a checkpoint, reports them again, and the driver leaves out what it has. So none is lost when a process or
the driver fails between a value and its report.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from freetrain_parsl.training.mailbox import Clock

__all__ = ["LoggedRows"]

_KEPT: Final = 1000  # rows in the state; one for each epoch, or as many as the user logs by steps
_LONGEST_TEXT: Final = 500  # characters of a value
_LONGEST_ROW: Final = 60_000  # characters; a row is one field of a message
_LONGEST_REPORT: Final = 256_000  # characters


class LoggedRows:
    """The last rows, and how many there have been.

    Parameters
    ----------
    clock
        Seconds since the epoch.
    """

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._rows: deque[str] = deque(maxlen=_KEPT)
        self.count = 0
        """Number of rows so far."""

    def add(self, step: int, epoch: int | None, values: Mapping[str, Any]) -> None:
        """Add values of an epoch, or of a step alone; without those that are ``None``, or too long for a message."""
        short = {
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in values.items()
            if value is not None
        }
        row = json.dumps({"step": step, "epoch": epoch, "time": self._clock(), "values": short})
        if len(row) <= _LONGEST_ROW:
            self._rows.append(row)
            self.count += 1

    def reports(self, sent: int) -> Iterator[tuple[str, ...]]:
        """Yield the rows after the first `sent` ones, as far as they are kept, in portions for one message each."""
        new = self.count - sent if 0 <= sent <= self.count else len(self._rows)
        portion: list[str] = []
        length = 0
        for row in list(self._rows)[-new:] if new else []:
            if length + len(row) > _LONGEST_REPORT:
                yield tuple(portion)
                portion, length = [], 0
            portion.append(row)
            length += len(row)
        if portion:
            yield tuple(portion)

    def state(self) -> dict[str, Any]:
        """Return the rows as plain values."""
        return {"count": self.count, "rows": list(self._rows)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        self.count = state["count"]
        self._rows = deque(state["rows"], maxlen=_KEPT)
