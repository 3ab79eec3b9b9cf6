"""Time that only a test moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock in seconds; waiting takes no real time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
