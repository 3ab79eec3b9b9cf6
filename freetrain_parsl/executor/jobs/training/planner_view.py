"""A training as the planner knows it, with costs that are estimated from measurements."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as planner

if TYPE_CHECKING:
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.jobs.training.commands import Response
    from freetrain_parsl.planning.model import CostsInSeconds
    from freetrain_parsl.protocol.reports import Progress

__all__ = ["FailureRate", "PlannerView", "changed_significantly", "learned_costs"]

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


class PlannerView:
    """Informs the planner of a training: its existence, its remaining work and its rescale costs.

    Parameters
    ----------
    request
        The submitted request.
    costs
        Rescale costs if the request does not state them, until they are measured.
    response
        Receives the planner's events.
    """

    def __init__(self, request: TrainingRequest, costs: CostsInSeconds, response: Response) -> None:
        self._name = request.name
        self._samples = request.samples
        self._costs_are_stated = request.costs is not None
        self._trainer = request.trainer(costs, submitted=response.now)
        self._costs = self._trainer.costs
        self._response = response

    def submit(self) -> None:
        """Let the planner assign nodes to it."""
        self._response.inform(planner.TrainerSubmitted(self._response.now, self._trainer))

    def withhold(self) -> None:
        """Let the planner assign it no nodes until it is submitted again."""
        self._response.inform(planner.TrainerWithheld(self._response.now, self._name))

    def finish(self) -> None:
        """Report that it has finished."""
        self._response.inform(planner.TrainerFinished(self._response.now, self._name))

    def fail(self) -> None:
        """Report that it has failed or was cancelled."""
        self._response.inform(planner.TrainerFailed(self._response.now, self._name))

    def advance(self, progress: Progress) -> None:
        """Report how much work is left, if its total is known."""
        total = progress.samples_total or self._samples
        if total is not None:
            left = max(0.0, float(total) - progress.samples)
            self._trainer = replace(self._trainer, work_left=left)
            self._response.inform(planner.TrainerProgressed(self._response.now, self._name, left))

    def measured(self, kind: str, seconds: float) -> None:
        """Update the rescale costs, unless the user stated them; report a significant change.

        Parameters
        ----------
        kind
            The cost that was measured: ``up``, ``down`` or ``start``.
        seconds
            The measurement.
        """
        if self._costs_are_stated:
            return
        self._costs = learned_costs(self._costs, kind, seconds)
        if changed_significantly(self._trainer.costs, self._costs):
            self._trainer = replace(self._trainer, costs=self._costs)
            self._response.inform(planner.TrainerLearned(self._response.now, self._trainer))
