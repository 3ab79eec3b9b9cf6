"""Whether a training has made no step for much longer than its steps take."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["StepWatch"]

_LEAST_SECONDS = 600.0  # compilation, validation and checkpoints are no steps
_MEDIANS = 50.0  # of the time of a step, where this is longer
_STEPS_KEPT = 31


class StepWatch:
    """The times of a training's steps, as its reports show them.

    Attributes
    ----------
    step
        The latest step.
    """

    def __init__(self) -> None:
        self.step = 0
        self._at: float | None = None  # when it was reported
        self._seconds: deque[float] = deque(maxlen=_STEPS_KEPT)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step; ``None`` before there are two."""
        return median(self._seconds) if self._seconds else None

    def take(self, step: int, now: float) -> None:
        """Take a report of `step`; a lower one than before: the training has resumed from a checkpoint."""
        if step == self.step and self._at is not None:
            return
        if self._at is not None and step > self.step:
            self._seconds.append((now - self._at) / (step - self.step))
        self.step, self._at = step, now

    def overdue(self, since: float, now: float) -> float | None:
        """Return how long there has been no step at least, in seconds; ``None``: not longer than is usual.

        The result only doubles, so that it rarely changes.

        Parameters
        ----------
        since
            When its group began, seconds.
        now
            Seconds.
        """
        limit = max(_LEAST_SECONDS, _MEDIANS * (self.step_seconds or 0.0))
        without = now - (since if self._at is None else max(since, self._at))
        return limit * 2.0 ** math.floor(math.log2(without / limit)) if without >= limit else None

    def sentence(self, seconds: float, nodes: str) -> str:
        """Describe that there has been no step for more than `seconds` on `nodes`."""
        usual = "" if self.step_seconds is None else f", and a step took {_span(self.step_seconds)}"
        last = f"the last that it reported was step {self.step}{usual}" if self.step else "it has made none yet"
        return f"has made no step for more than {_span(seconds)} on {nodes}; {last}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.3g} s"
