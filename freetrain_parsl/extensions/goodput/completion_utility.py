"""The objective of SMD (INFOCOM 2021, arXiv 2105.13855): what users say that a completion time is worth to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.objectives.base import Contextual, NetOfChanges, Objective, Tabulated

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from freetrain_parsl.planning.model import Trainer
    from freetrain_parsl.planning.objectives.base import Moment

__all__ = ["CompletionUtility"]

_MOST_EXPONENT = 20.0  # late jobs are worth little, but more than idle nodes


@dataclass(frozen=True)
class CompletionUtility(Contextual):
    """Maximise the sum of sigmoid utilities of completion times: 1 / (1 + exp(k (t / d - 1))).

    t is the time from a trainer's submission to its end if it keeps its number of nodes, restart included, and d its
    deadline, likewise from its submission. A trainer without a deadline, or of unknown work, is worth nothing.

    SMD chooses workers and servers of every job, subject to several resources; with one kind of node and no servers,
    its multiple-choice knapsack is the count model.

    Parameters
    ----------
    steepness
        k: how abruptly the value falls at the deadline. Large values are hard deadlines.
    """

    steepness: float = 4.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.steepness) and self.steepness > 0):
            raise InvalidSettings(f"objective 'completion-utility': steepness must be positive, got {self.steepness!r}")

    def at_moment(self, moment: Moment) -> Objective:
        """Make the objective; see `Contextual.at_moment`."""
        return NetOfChanges(
            _Utilities(self.steepness, moment.now, moment.held, charged=False),
            _Utilities(self.steepness, moment.now, moment.held, charged=True),
        )


@dataclass(frozen=True)
class _Utilities(Tabulated):
    """Utilities by number of nodes, with or without the seconds that a change takes."""

    steepness: float
    now: float
    held: Mapping[str, int]
    charged: bool

    def table(self, trainer: Trainer, last: int) -> npt.NDArray[np.float64]:
        """Tabulate; see `Tabulated.table`."""
        if trainer.deadline is None or not math.isfinite(trainer.work_left) or trainer.deadline <= trainer.submitted:
            return np.zeros(last + 1)
        held, costs = self.held.get(trainer.name, 0), trainer.costs
        change = np.full(last + 1, costs.up if held else costs.start)
        change[: held + 1] = costs.down
        change[held : held + 1] = 0.0
        rates = trainer.curve.rates(last)
        left = np.divide(trainer.work_left, rates, out=np.full(last + 1, np.inf), where=rates > 0)
        taken = self.now - trainer.submitted + left + change * self.charged
        exponents = self.steepness * (taken / (trainer.deadline - trainer.submitted) - 1)
        utilities = 1 / (1 + np.exp(np.minimum(exponents, _MOST_EXPONENT)))
        table: npt.NDArray[np.float64] = np.where(rates > 0, utilities, 0.0)
        return table
