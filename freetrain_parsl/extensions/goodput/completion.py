"""Objectives for completion times: fast progress of all, soon-ending first; and what users say that a time is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.objectives.base import Contextual, NetOfChanges, Objective, Tabulated

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from freetrain_parsl.planning.model import PlannedJob
    from freetrain_parsl.planning.objectives.base import Moment

__all__ = ["CompletionTime", "CompletionUtility", "Urgency"]

_YOUNG = 600.0  # node-seconds: jobs that have had less are equally likely to end soon
_OLD = 10_000.0  # seconds since submission from which a job's weight rises with its age


class Urgency(str, Enum):
    """From what the seconds that a trainer still needs are estimated."""

    WORK = "work"
    """Its work left, on its smallest number of nodes. Trainers of unknown work count as equally urgent."""
    SERVICE = "service"
    """The node-seconds that it has had: the longer a job has run, the longer it is likely to run on."""
    NONE = "none"
    """Nothing: all are equally urgent."""


@dataclass(frozen=True)
class CompletionTime(Contextual):
    r"""Minimise the mean completion time, approximately.

    ::

        maximise  sum_j  [s_j(n_j) (1 - c_j/h [n_j changes])]^(1-a) / (1-a)  R_j^(-b)  max(1, T_j/10,000 s)^d

    with s_j(n) the rate on n nodes relative to that on ``min_nodes``, c_j the cost of the change in seconds, h the time
    that a decision is expected to last, R_j the seconds that trainer j still needs, and T_j those since its submission.
    With b = 0 and a -> 1, the shares are proportionally fair; a larger b favours short jobs, as
    shortest-remaining-time-first does, and d > 0 keeps it from starving long ones (priority aging).

    Parameters
    ----------
    urgency
        What R_j is.
    fairness
        a, from 0 (the sum of speed-ups) to less than 1.
    preference
        b, zero or more.
    horizon
        h, seconds.
    aging
        d, zero or more.
    """

    urgency: Urgency = Urgency.WORK
    fairness: float = 0.35
    preference: float = 0.3
    horizon: float = 180.0
    aging: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.fairness < 1:
            raise InvalidSettings(f"objective 'completion-time': fairness must lie in [0, 1), got {self.fairness!r}")
        if not (math.isfinite(self.preference) and self.preference >= 0):
            raise InvalidSettings(
                f"objective 'completion-time': preference must be zero or more, got {self.preference!r}"
            )
        if not (math.isfinite(self.horizon) and self.horizon > 0):
            raise InvalidSettings(f"objective 'completion-time': horizon must be positive, got {self.horizon!r}")
        if not (math.isfinite(self.aging) and self.aging >= 0):
            raise InvalidSettings(f"objective 'completion-time': aging must be zero or more, got {self.aging!r}")

    @classmethod
    def knowing(cls, urgency: Urgency) -> CompletionTime:
        """Return the objective with the exponents that suit what is known; docs/decisions/0040 has the measurements."""
        return cls(urgency, *_EXPONENTS.get(urgency, ()))

    def at_moment(self, moment: Moment) -> Objective:
        """Make the objective; see `Contextual.at_moment`."""
        weights = {trainer.name: self._weight(trainer, moment.now) for trainer in moment.trainers}
        gross = _Progress(weights, self.fairness)
        return NetOfChanges(gross, _Kept(gross, moment.held, self.horizon))

    def _weight(self, trainer: PlannedJob, now: float) -> float:
        seconds = _YOUNG
        if self.urgency is Urgency.SERVICE:
            seconds += trainer.service
        elif self.urgency is Urgency.WORK and math.isfinite(trainer.work_left):
            seconds = max(trainer.work_left / _unit(trainer), 1.0)
        age = max((now - trainer.submitted) / _OLD, 1.0)
        return float(seconds**-self.preference * age**self.aging)


_EXPONENTS = {
    Urgency.SERVICE: (0.6, 0.15, 200.0, 0.4),
    Urgency.NONE: (0.75, 0.0, 150.0, 0.0),
}
"""What is known -> a, b, h, d, where they are not the defaults."""


@dataclass(frozen=True)
class _Progress(Tabulated):
    """The value of each trainer's speed-up, without changes."""

    weights: Mapping[str, float]
    fairness: float

    def table(self, trainer: PlannedJob, last: int) -> npt.NDArray[np.float64]:
        """Tabulate; see `Tabulated.table`."""
        power = 1 - self.fairness
        speedups = trainer.curve.rates(last) / _unit(trainer)
        table: npt.NDArray[np.float64] = self.weights[trainer.name] / power * speedups**power
        return table


@dataclass(frozen=True)
class _Kept(Tabulated):
    """The same, with speed-ups reduced by the share of the horizon that a change costs."""

    gross: _Progress
    held: Mapping[str, int]
    horizon: float

    def table(self, trainer: PlannedJob, last: int) -> npt.NDArray[np.float64]:
        """Tabulate; see `Tabulated.table`."""
        seconds = _seconds_of_change(trainer, self.held.get(trainer.name, 0), last)
        left = np.maximum(1 - seconds / self.horizon, 0.0)
        return self.gross.table(trainer, last) * left ** (1 - self.gross.fairness)


def _seconds_of_change(trainer: PlannedJob, held: int, last: int) -> npt.NDArray[np.float64]:
    """Tabulate the seconds that a change from `held` to 0, 1, …, `last` nodes takes."""
    if held:
        return trainer.costs.changes(held, last)
    return np.where(np.arange(last + 1) > 0, trainer.costs.start, 0.0)


def _unit(trainer: PlannedJob) -> float:
    """Return the rate on ``min_nodes``; one if that is zero."""
    return trainer.rate(trainer.min_nodes) or 1.0


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

    def table(self, trainer: PlannedJob, last: int) -> npt.NDArray[np.float64]:
        """Tabulate; see `Tabulated.table`."""
        if trainer.deadline is None or not math.isfinite(trainer.work_left) or trainer.deadline <= trainer.submitted:
            return np.zeros(last + 1)
        change = _seconds_of_change(trainer, self.held.get(trainer.name, 0), last)
        rates = trainer.curve.rates(last)
        left = np.divide(trainer.work_left, rates, out=np.full(last + 1, np.inf), where=rates > 0)
        taken = self.now - trainer.submitted + left + change * self.charged
        exponents = self.steepness * (taken / (trainer.deadline - trainer.submitted) - 1)
        utilities = 1 / (1 + np.exp(np.minimum(exponents, _MOST_EXPONENT)))
        table: npt.NDArray[np.float64] = np.where(rates > 0, utilities, 0.0)
        return table
