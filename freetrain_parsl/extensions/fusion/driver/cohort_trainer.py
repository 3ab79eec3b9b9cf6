"""A cohort as the planner knows it: one trainer, whose throughput on some nodes is that of the best arrays there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.training.progress import changed_significantly, learned_costs
from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from freetrain_parsl.executor.jobs.commands import Response
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.extensions.fusion.driver.members import CohortMember
    from freetrain_parsl.planning.model import CostsInSeconds

__all__ = ["CohortTrainer", "cohort_as_trainer"]

_SIGNIFICANT = 0.05  # relative change of a rate below which the planner keeps the curve that it has
_POINTS = 16  # of a curve
_FEW = 50  # members, below which each counts
_WEIGHT = 0.2  # of the newest measurement of a rate


class CohortTrainer:
    """Informs the planner of a cohort; an array runs in each slot of its nodes."""

    def __init__(
        self,
        name: str,
        limit: int | None,
        costs: CostsInSeconds,
        slots_per_unit: int,
        best_rate: Callable[[], float],
        response: Response,
    ) -> None:
        self.fusion = FusionCurve()
        """Throughput of an array by its number of members, as far as it was measured."""
        self.in_turns = False
        """Whether the members of an array are not fused, but step in turns: each array is as fast as one of them."""
        self._name = name
        self._limit = limit
        self._costs = costs
        self._slots = slots_per_unit
        self._best_rate = best_rate
        self._response = response
        self._rate: float | None = None  # of one member alone, samples per second
        self._sent: PlannedJob | None = None
        self._counted = 0  # members, when the curve was computed
        self._known: object = None

    @property
    def start_seconds(self) -> float:
        """Time from the start of an array to its first step."""
        return self._costs.start

    def submit(self, members: Collection[CohortMember]) -> None:
        """Let the planner assign nodes to the cohort."""
        self._sent = self._described(members)
        self._response.inform(planner.TrainerSubmitted(self._response.now, self._sent))

    def withhold(self) -> None:
        """Let the planner assign it no nodes until it is submitted again."""
        if self._sent is not None:
            self._response.inform(planner.TrainerWithheld(self._response.now, self._name))
            self._sent = None

    def finish(self) -> None:
        """Report that all members have left the cohort."""
        if self._sent is not None:
            self._response.inform(planner.TrainerFinished(self._response.now, self._name))
            self._sent = None

    def update(self, members: Collection[CohortMember]) -> None:
        """Report significant changes of its members, of their throughput and of their remaining work."""
        if (sent := self._sent) is None or not self._is_news(len(members)):
            return
        now = self._described(members)
        if (
            now.max_nodes != sent.max_nodes
            or _differ(now.curve, sent.curve)
            or changed_significantly(sent.costs, now.costs)
        ):
            self._sent = now
            self._response.inform(planner.TrainerLearned(self._response.now, now))
        elif abs(now.work_left - sent.work_left) > _SIGNIFICANT * sent.work_left:
            self._sent = replace(sent, work_left=now.work_left)
            self._response.inform(planner.TrainerProgressed(self._response.now, self._name, now.work_left))

    def _is_news(self, members: int) -> bool:
        """Return whether the curve should be computed anew: that takes long for a thousand members."""
        rate = None if self._rate is None else round(math.log(self._rate) / _SIGNIFICANT)
        known = (self.fusion, rate, self._costs)
        if known == self._known and abs(members - self._counted) * _FEW <= self._counted and members > _FEW:
            return False
        self._known, self._counted = known, members
        return True

    def started(self, seconds: float) -> None:
        """Take the time from the start of an array to its first step."""
        self._costs = learned_costs(self._costs, "start", seconds)

    def measured_gain(self, members: int, gain: float) -> None:
        """Take the throughput of an array relative to one member alone."""
        if members > 1 and math.isfinite(gain) and gain > 0:
            self.fusion = FusionCurve(
                [point for point in self.fusion.points if 1 < point[0] < members] + [(members, gain)]
            )

    def takes_turns(self) -> None:
        """Take that members of an array step in turns."""
        self.fusion, self.in_turns = FusionCurve(), True

    def measured_rate(self, members: int, rate: float) -> None:
        """Take the samples per second of one of the members of an array."""
        alone = members * rate / self.fusion(members)
        if math.isfinite(alone) and alone > 0:
            self._rate = alone if self._rate is None else (1 - _WEIGHT) * self._rate + _WEIGHT * alone

    def sizes(self, members: int, slots: int, known: int | None) -> tuple[int, ...]:
        """Return the sizes of the arrays for this number of members and slots, largest first.

        Parameters
        ----------
        members, slots
            Their numbers.
        known
            The best size of an array, if it is known; ``None``: members are spread evenly, and the arrays find out.
            Members that step in turns are spread evenly, too: no array is faster than another one.
        """
        if known is None or self.in_turns:
            share, more = divmod(members, min(slots, members))
            even = [share + 1] * more + [share] * (min(slots, members) - more)
            most = min(self._limit or members, known or members)
            return tuple(min(size, most) for size in even)
        return self.fusion.grouping(members, slots, known)

    def _described(self, members: Collection[CohortMember]) -> PlannedJob:
        requests = [member.request for member in members]
        left = [member.samples_left for member in members]
        rate = self._rate
        if rate is None:
            scaling = requests[0].scaling
            rate = self._best_rate() if scaling.relative else scaling(1)
        described = cohort_as_trainer(
            self._name,
            requests,
            costs=self._costs,
            slots_per_unit=self._slots,
            submitted=self._response.now if self._sent is None else self._sent.submitted,
            rate=rate,
            fusion=self.fusion,
            measured=self._rate is not None,
        )
        return replace(described, work_left=math.inf if None in left else math.fsum(each or 0.0 for each in left))


def cohort_as_trainer(
    name: str,
    requests: Sequence[TrainingRequest],
    *,
    costs: CostsInSeconds,
    slots_per_unit: int,
    submitted: float,
    rate: float = 1.0,
    fusion: FusionCurve | None = None,
    measured: bool = False,
) -> PlannedJob:
    """Return a cohort as one trainer, whose throughput on some nodes is that of the best arrays there.

    Parameters
    ----------
    name
        Its name.
    requests
        Those of its members.
    costs
        Rescale costs if the requests do not state them.
    slots_per_unit
        Number of slots of a unit that the planner assigns.
    submitted
        When it was submitted, seconds.
    rate
        Samples per second of one member alone in a slot.
    fusion
        Throughput of an array by its number of members; ``None``: not known, no gain is assumed.
    measured
        Whether `rate` was measured, and not assumed.
    """
    first, fusion = requests[0], fusion or FusionCurve()
    trainers = [request.trainer(costs, submitted) for request in requests]
    limit = None if first.fusion is None else first.fusion.limit
    max_nodes = max(1, math.ceil(len(requests) / slots_per_unit))
    return PlannedJob(
        name=name,
        min_nodes=1,
        max_nodes=max_nodes,
        curve=ScalingCurve(
            {
                nodes: rate
                * math.fsum(
                    map(fusion, fusion.grouping(len(requests), nodes * slots_per_unit, fusion.best_size(limit)))
                )
                for nodes in _some_up_to(max_nodes)
            },
            relative=first.scaling.relative and not measured,
        ),
        costs=first.costs or costs,
        work_left=math.fsum(trainer.work_left for trainer in trainers),
        priority=first.priority,
        deadline=min((each.deadline for each in trainers if each.deadline is not None), default=None),
        submitted=submitted,
        node_kinds=first.node_kinds,
    )


def _some_up_to(most: int) -> list[int]:
    """Return 1, `most` and some numbers between them, at equal ratios."""
    step = max(1.0, most ** (1 / _POINTS))
    return sorted({1, most} | {min(most, math.ceil(step**power)) for power in range(_POINTS + 1)})


def _differ(one: ScalingCurve, other: ScalingCurve) -> bool:
    before, after = dict(one.points), dict(other.points)
    if one.relative != other.relative or before.keys() != after.keys():
        return True
    return any(abs(after[nodes] - rate) > _SIGNIFICANT * rate for nodes, rate in before.items())
