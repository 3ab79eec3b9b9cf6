"""How fast a fragment goes: recent throughput, and the longest recent step."""

from __future__ import annotations

import math

_MEMORY_SECONDS = 5.0
_LONGEST_STEP_DECAY = 0.95  # an unusually long step is forgotten after some tens of steps


class Pace:
    """Exponentially weighted throughput over the last seconds.

    The first step of a fragment is left out: it pays for lazy initialisation.
    """

    def __init__(self) -> None:
        self._samples = 0.0
        self._seconds = 0.0
        self._steps = 0
        self.longest_step = 0.0
        """Seconds of the longest of the recent steps, the first one included."""

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
        """Forget the throughput, which is another in another group; the longest step stays a warning."""
        self._samples = self._seconds = 0.0
        self._steps = 0

    @property
    def rate(self) -> float | None:
        """Samples a second; ``None`` before the second step."""
        return self._samples / self._seconds if self._seconds > 0 else None
