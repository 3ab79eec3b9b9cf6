"""A training as the planner knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.training.cost_estimates import changed_significantly, learned_costs
from freetrain_parsl.planning import events as planner

if TYPE_CHECKING:
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.jobs.training.response import Response
    from freetrain_parsl.planning.model import CostsInSeconds
    from freetrain_parsl.protocol.reports import Progress

__all__ = ["PlannerView"]


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
