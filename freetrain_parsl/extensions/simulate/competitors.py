"""Policies that can be compared, and what each knows and may choose."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.extensions.goodput.completion_time import CompletionTime, Urgency
from freetrain_parsl.extensions.goodput.completion_utility import CompletionUtility
from freetrain_parsl.extensions.goodput.ones import OnesPolicy
from freetrain_parsl.extensions.goodput.ones_published import OnesPublishedPolicy
from freetrain_parsl.extensions.goodput.optimus import OptimusPolicy
from freetrain_parsl.extensions.goodput.tiresias import TiresiasPolicy
from freetrain_parsl.extensions.simulate.description import JobDescription, Sizing
from freetrain_parsl.planning.policies import (
    EqualSharePolicy,
    FirstComeFirstServedPolicy,
    MilpPolicy,
    Policy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.extensions.simulate.jobs.cluster import ClusterShape

__all__ = ["COMPETITORS", "Competitor", "JobKnowledge", "competitors"]


class JobKnowledge(str, Enum):
    """What a policy knows about jobs."""

    NONE = "none"
    """Their curves, but not how long they will run."""
    AGE = "age"
    """Also the GPU-seconds that each has had."""
    CURVES = "curves"
    """The work left, but no curves: throughput and efficiency are measured while a job runs, which may have at most
    twice the GPUs that it has been measured on."""
    WORK = "work"
    """The curves and the work left."""


@dataclass(frozen=True)
class Competitor:
    """A policy as it competes.

    Parameters
    ----------
    policy
        Its name.
    knowledge
        What it knows.
    sizing
        What it may choose.
    make
        Makes the policy.
    placements
        Whether it knows the goodput on each placement.
    epochs
        Whether it knows the epochs done and left.
    deadline_factor
        Deadlines of jobs, if it knows any: multiples of the time that they take as requested.
    most_requested
        The most GPUs of a job, in units of those that its user asks for; ``None`` for no limit.
    """

    policy: str
    knowledge: JobKnowledge
    sizing: Sizing
    make: Callable[[], Policy]
    placements: bool = False
    epochs: bool = False
    deadline_factor: float | None = None
    most_requested: int | None = None

    def description(self, cluster: ClusterShape) -> JobDescription:
        """Return what it knows of jobs."""
        return JobDescription(
            cluster,
            self.sizing,
            work_known=self.knowledge in {JobKnowledge.WORK, JobKnowledge.CURVES},
            curves_known=self.knowledge is not JobKnowledge.CURVES,
            placements_known=self.placements,
            epochs_known=self.epochs,
            deadline_factor=self.deadline_factor,
            most_requested=self.most_requested,
        )


_URGENCY = {
    JobKnowledge.NONE: Urgency.NONE,
    JobKnowledge.AGE: Urgency.SERVICE,
    JobKnowledge.CURVES: Urgency.WORK,
    JobKnowledge.WORK: Urgency.WORK,
}


def _milp(knowledge: JobKnowledge) -> Competitor:
    objective = CompletionTime.knowing(_URGENCY[knowledge])
    return Competitor(MilpPolicy.name, knowledge, Sizing.BOTH, lambda: MilpPolicy(objective))


def _ones(knowledge: JobKnowledge) -> Competitor:
    objective = CompletionTime.knowing(_URGENCY[knowledge])
    return Competitor(OnesPolicy.name, knowledge, Sizing.BOTH, lambda: OnesPolicy(objective), placements=True)


_FIXED = {
    made.policy: made
    for made in (
        Competitor("fcfs", JobKnowledge.NONE, Sizing.RIGID, FirstComeFirstServedPolicy),
        Competitor("tiresias", JobKnowledge.AGE, Sizing.RIGID, TiresiasPolicy),
        Competitor("optimus", JobKnowledge.WORK, Sizing.GPUS, OptimusPolicy),
        Competitor("equal-share", JobKnowledge.NONE, Sizing.BOTH, EqualSharePolicy),
        Competitor(
            "smd",
            JobKnowledge.WORK,
            Sizing.BOTH,
            lambda: MilpPolicy(CompletionUtility()),
            deadline_factor=2.0,
        ),
        Competitor(
            OnesPublishedPolicy.name,
            JobKnowledge.WORK,
            Sizing.BOTH,
            OnesPublishedPolicy,
            epochs=True,
            most_requested=4,
        ),
    )
}
_CHOOSING: dict[str, Callable[[JobKnowledge], Competitor]] = {MilpPolicy.name: _milp, OnesPolicy.name: _ones}

COMPETITORS = (*_FIXED, *_CHOOSING)
"""Names of the policies. All but ``milp`` and ``ones`` have a knowledge of their own."""


def competitors(policies: Sequence[str], knowledge: Sequence[JobKnowledge]) -> list[Competitor]:
    """Return the named policies, with each knowledge if they use it.

    Raises
    ------
    InvalidSettings
        A name is unknown.
    """
    made: list[Competitor] = []
    for name in policies:
        if name in _FIXED:
            made.append(_FIXED[name])
        elif name in _CHOOSING:
            made += map(_CHOOSING[name], knowledge)
        else:
            raise InvalidSettings(
                f"unknown policy {name!r}{did_you_mean(name, COMPETITORS)}; available: {', '.join(sorted(COMPETITORS))}"
            )
    return made
