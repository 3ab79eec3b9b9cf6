"""What the executor learns of its trainings: what rescales cost, and how often trainings fall back on a checkpoint."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import RescaleCosts

__all__ = ["FailureRate", "changed_significantly", "learned_costs"]

_WEIGHT = 0.5  # of the newest measurement in the exponential mean: machines and models change little, noise is small
_SIGNIFICANT = 0.1  # relative change below which the planner is not told


def learned_costs(known: RescaleCosts, kind: str, seconds: float) -> RescaleCosts:
    """Return costs with one more measurement in their mean.

    Parameters
    ----------
    known
        The costs so far.
    kind
        ``up``, ``down`` or ``start``: what was measured.
    seconds
        The measurement; one that is negative or not finite is left out.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        return known
    before: float = getattr(known, kind)
    return replace(known, **{kind: (1 - _WEIGHT) * before + _WEIGHT * seconds})


def changed_significantly(known: RescaleCosts, learned: RescaleCosts) -> bool:
    """Whether costs differ so much from those that the planner knows that it is to be told."""
    pairs = zip(astuple(known), astuple(learned), strict=True)
    return any(abs(after - before) > _SIGNIFICANT * before for before, after in pairs)


@dataclass
class FailureRate:
    """How long trainings run between failures after which they start from a checkpoint.

    Parameters
    ----------
    seconds
        Running time of all trainings; begins with an hour, the guess before there is any experience.
    failures
        Starts from a checkpoint because all members failed; begins with one, to go with that hour.
    """

    seconds: float = 3600.0
    failures: int = 1

    @property
    def mean_time_between(self) -> float:
        """Seconds."""
        return self.seconds / self.failures
