"""The speed of a fragment: recent throughput, and the longest recent step."""

from __future__ import annotations

import math

_MEMORY_SECONDS = 5.0
_LONGEST_STEP_DECAY = 0.95  # an unusually long step is forgotten after some dozens of steps


class Pace:
    """Exponentially weighted throughput over the last seconds.

    The first step of a fragment is excluded, since it includes lazy initialization.
    """

    def __init__(self) -> None:
        self._samples = 0.0
        self._seconds = 0.0
        self._steps = 0
        self.longest_step = 0.0
        """Seconds of the longest recent step, the first step included."""

    def add(self, samples: int, seconds: float) -> None:
        """Count a step."""
        self.longest_step = max(seconds, _LONGEST_STEP_DECAY * self.longest_step)
        self._steps += 1
        if self._steps == 1:
            return
        decay = math.exp(-seconds / _MEMORY_SECONDS)
        self._samples = decay * self._samples + samples
        self._seconds = decay * self._seconds + seconds

    def restart(self) -> None:
        """Reset the throughput, which differs between groups, but keep the longest step."""
        self._samples = self._seconds = 0.0
        self._steps = 0

    @property
    def rate(self) -> float | None:
        """Samples per second; ``None`` before the second step."""
        return self._samples / self._seconds if self._seconds > 0 else None
