"""Chooses the values of trainings that the journal keeps for their curves: a thin sample, whatever they report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from freetrain_parsl.executor.values.rows import parse_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ValueSamples"]

_LEAST_PAUSE: Final = 1.0  # seconds between two values of a name
_SHARE: Final = 0.02  # of the time since the first value
_MOST_NAMES: Final = 20  # of a training
_MOST_ROWS: Final = 3  # of a report that are looked at: the newest ones
_LONGEST_NAME: Final = 100


class ValueSamples:
    """Chooses values by time: two of a training and name are at least 2 % of its age apart.

    So there are about fifty for each factor *e* of time: some four hundred in a day.
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[str, tuple[float, float]]] = {}  # training -> name -> first, last
        self._with_loss: set[str] = set()  # trainings that report the loss of their steps

    def admit(self, training: str) -> None:
        """Choose values that this training logs, too; slots may name others."""
        self._times.setdefault(training, {})

    def choose_loss(self, time: float, training: str, loss: float) -> dict[str, float]:
        """Return the mean loss of a progress report as ``loss``, if it is to be kept."""
        self._with_loss.add(training)
        return self.choose(time, training, {"loss": loss})

    def choose(self, time: float, training: str, values: Mapping[str, object]) -> dict[str, float]:
        """Return those of the values that are to be kept; `time` in seconds."""
        known = self._times.setdefault(training, {})
        chosen = {}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            key = name[:_LONGEST_NAME]
            if key not in known and len(known) == _MOST_NAMES:
                continue
            first, last = known.get(key, (time, -math.inf))
            if time - last >= max(_LEAST_PAUSE, _SHARE * (time - first)):
                known[key] = (first, time)
                chosen[key] = float(value)
        return chosen

    def choose_rows(self, time: float, training: str, rows: Sequence[str]) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the values to be kept of the newest rows of a report, see `protocol.reports.Logged`.

        Trainings that were not admitted have none. A value that the user logs as ``loss`` is left out if the training
        reports the loss of its steps, too: that is the curve of this name.
        """
        if training not in self._times:
            return
        for text in rows[-_MOST_ROWS:]:
            row = parse_row(text)
            if row is None:
                continue
            values = {
                name: value for name, value in row.values.items() if name != "loss" or training not in self._with_loss
            }
            if chosen := self.choose(time, training, values):
                yield row.step, chosen
