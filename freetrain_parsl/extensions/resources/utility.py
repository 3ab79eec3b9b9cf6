"""What a job's completion time is worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from freetrain_parsl.errors import InvalidTrainer

__all__ = ["SigmoidUtility", "Utility"]

Utility = Callable[[float], float]
"""Completion time in seconds -> value, finite; a job that gets nothing is worth zero."""

_LARGEST_EXPONENT = 700.0  # beyond it, the exponential overflows


@dataclass(frozen=True)
class SigmoidUtility:
    """Value that falls around a critical time: top / (1 + exp(steepness × (seconds − critical))).

    OASiS (Bao et al., INFOCOM 2018) and SMD use it: a steepness of zero is a job that does not care about time, a large
    one a deadline.

    Parameters
    ----------
    top
        Value of an immediate completion, if the steepness is large.
    steepness
        How abruptly the value falls, per second.
    critical
        When half of `top` is left, seconds.

    Raises
    ------
    InvalidTrainer
        A value is negative or not finite.
    """

    top: float
    steepness: float
    critical: float

    def __post_init__(self) -> None:
        for name in ("top", "steepness", "critical"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidTrainer(f"sigmoid: {name} must be zero or more, got {getattr(self, name)!r}")

    def __call__(self, seconds: float) -> float:
        """Return the value of a completion after so many seconds."""
        exponent = self.steepness * (seconds - self.critical)
        return 0.0 if exponent > _LARGEST_EXPONENT else self.top / (1 + math.exp(exponent))
