"""What the executor learns of its trainings while they run: what rescales cost, and how often members are lost."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import RescaleCosts

__all__ = ["LossRate", "are_news", "learned_costs"]

_WEIGHT = 0.5  # of the newest measurement in the exponential mean: machines and models change little, noise is small
_NEWS = 0.1  # a change by less (of itself) is not worth telling the planner


def learned_costs(known: RescaleCosts, kind: str, seconds: float) -> RescaleCosts:
    """Return costs with one more measurement in their mean.

    Parameters
    ----------
    known
        The costs so far.
    kind
        ``up``, ``down`` or ``start``: what was measured.
    seconds
        The measurement; one that cannot be, because it is negative or not finite, teaches nothing.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        return known
    before: float = getattr(known, kind)
    return replace(known, **{kind: (1 - _WEIGHT) * before + _WEIGHT * seconds})


def are_news(told: RescaleCosts, learned: RescaleCosts) -> bool:
    """Whether costs differ so much from those that the planner was told that it should hear of them."""
    pairs = zip(astuple(told), astuple(learned), strict=True)
    return any(abs(after - before) > _NEWS * before for before, after in pairs)


@dataclass
class LossRate:
    """How long trainings run between losses that cost them work: those after which they start from a checkpoint.

    Parameters
    ----------
    seconds
        Running time of all trainings; begins with an hour, the guess before there is any experience.
    losses
        Starts from a checkpoint because all members were lost; begins with one, to go with that hour.
    """

    seconds: float = 3600.0
    losses: int = 1

    @property
    def mean_time_between(self) -> float:
        """Seconds."""
        return self.seconds / self.losses
