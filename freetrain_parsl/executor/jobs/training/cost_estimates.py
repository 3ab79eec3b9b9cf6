"""Estimates from measurements: rescale costs, and the rate at which trainings fall back to a checkpoint."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import CostsInSeconds

__all__ = ["FailureRate", "changed_significantly", "learned_costs"]

_WEIGHT = 0.5  # of the newest measurement in the exponential moving average: conditions change little, noise is small
_SIGNIFICANT = 0.1  # relative change below which the planner is not updated


def learned_costs(known: CostsInSeconds, kind: str, seconds: float) -> CostsInSeconds:
    """Return costs updated with one more measurement.

    Parameters
    ----------
    known
        The current costs.
    kind
        The cost that was measured: ``up``, ``down`` or ``start``.
    seconds
        The measurement; ignored if negative or not finite.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        return known
    before: float = getattr(known, kind)
    return replace(known, **{kind: (1 - _WEIGHT) * before + _WEIGHT * seconds})


def changed_significantly(known: CostsInSeconds, learned: CostsInSeconds) -> bool:
    """Return whether costs differ enough from those that the planner knows to update it."""
    pairs = zip(astuple(known), astuple(learned), strict=True)
    return any(abs(after - before) > _SIGNIFICANT * before for before, after in pairs)


@dataclass
class FailureRate:
    """The mean time between failures after which a training restarts from a checkpoint.

    Parameters
    ----------
    seconds
        Running time of all trainings; starts at one hour, as a prior.
    failures
        Number of restarts from a checkpoint because all members failed; starts at one, as a prior.
    """

    seconds: float = 3600.0
    failures: int = 1

    @property
    def mean_time_between(self) -> float:
        """The mean, in seconds."""
        return self.seconds / self.failures
