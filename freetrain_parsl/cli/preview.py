"""Code shared by ``freetrain plan`` and ``freetrain explain``: one survey, and the planner's decision on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.node_kinds import WindowsByKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.cli.sources import ChosenSource
    from freetrain_parsl.executor.jobs.port import JobKind
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.planning.explain import Explanation
    from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
    from freetrain_parsl.windows.base import Survey, WindowSource
    from freetrain_parsl.windows.state import BatchState

CampaignArgument = Annotated[
    str | None,
    typer.Argument(metavar="[CAMPAIGN]", help="Campaign file. Default: one training job on any number of nodes."),
]

_JOBS = "freetrain."  # prefix of the job names of all our blocks
_WITHOUT_CAMPAIGN = "no campaign given: assuming one training job on any number of nodes"
_STAND_IN = "any"
_TICK = 1e-6  # seconds


@dataclass(frozen=True)
class PlannerAnswer:
    """A survey of the batch system and the planner's decision on it.

    Parameters
    ----------
    survey
        State of the batch system.
    explanation
        The planner's decision.
    notes
        Assumptions, one line each.
    slots_per_node
        The least number of slots of a node.
    units_per_node
        Number of slots of a node where training jobs share nodes, otherwise 1.
    """

    survey: Survey
    explanation: Explanation
    notes: tuple[str, ...]
    slots_per_node: int = 1
    units_per_node: int = 1


def ask_planner(chosen: ChosenSource, campaign: str | None, variables: Variables) -> PlannerAnswer:
    """Query the batch system once, and ask the planner what it would do now.

    Parameters
    ----------
    chosen
        The batch system and its settings.
    campaign
        Path of the campaign file, if any.
    variables
        Given on the command line; unused ones are rejected.

    Raises
    ------
    UsageError
        The campaign cannot be read, or nothing could ever be submitted here.
    BatchSystemError
        The batch system did not answer.
    """
    from freetrain_parsl.executor.node_kinds import refuse_unknown_kinds
    from freetrain_parsl.planning.blocks import least_walltime
    from freetrain_parsl.planning.explain import explain_windows
    from freetrain_parsl.planning.policies import resolve_policy

    requests = None if campaign is None else _read_campaign(campaign, variables)
    variables.refuse_unused()
    settings, costs = chosen.settings.in_seconds(), chosen.costs.in_seconds()
    chosen.source.check(least_walltime(settings))
    survey = chosen.source.survey()
    pending, notes, held = _our_jobs(chosen.source)
    notes += filter(None, [chosen.describe_unused()])
    ours = {node: f"runs your block, job {held[node]}" for node in survey.unused if node in held}
    survey = replace(survey, unused={**survey.unused, **ours})
    units = 1 if requests is None else chosen.units_per_node
    if requests is None:
        notes.append(f"{_WITHOUT_CAMPAIGN}{', for each kind' if chosen.speeds else ''}")
        trainers = [_stand_in(survey, costs, kind) for kind in chosen.speeds or [""]]
    else:
        for request in requests:
            refuse_unknown_kinds(request, chosen.speeds)
        on_nodes = [request.on_nodes(chosen.slots_per_node, units) for request in requests]
        trainers, cohorts = _as_trainers(on_nodes, costs, survey.time)
        notes += cohorts
    if chosen.speeds:
        trainers = _on_kinds(trainers, chosen.speeds)
    explanation = explain_windows(
        survey.windows,
        trainers,
        resolve_policy(chosen.policy),
        settings,
        survey.terms,
        survey.time,
        pending,
        survey.terms_by_kind,
        units,
    )
    for trainer in trainers:
        usable = [n for kind, n in survey.nodes_by_kind.items() if trainer.may_use(kind)]
        most = max(usable, default=survey.nodes)
        if most is not None and (needed := -(-trainer.min_nodes // units)) > most:
            notes.append(
                f"training job {trainer.name} needs {needed} nodes at the same time, but there are only "
                f"{most}: it would be rejected"
            )
    slots = min(chosen.slots_per_node.values())
    return PlannerAnswer(survey, explanation, (*notes, *survey.notes), slots, chosen.units_per_node)


def _read_campaign(campaign: str, variables: Variables) -> list[TrainingRequest]:
    from freetrain_parsl.campaign.files.campaign import Campaign
    from freetrain_parsl.training.checkpoints.code.code_identity import code_of

    trainings = Campaign.load(campaign, variables).trainings
    return [training.app.request(training.name, code_of(training.app.func)) for training in trainings]


def _as_trainers(
    requests: Sequence[TrainingRequest], costs: CostsInSeconds, now: float
) -> tuple[list[PlannedJob], list[str]]:
    """Return the jobs of the requests as the planner will see them, and a note for each of several training jobs."""
    from freetrain_parsl.executor.jobs.port import JOBS

    kinds = list(JOBS.usable())
    groups: dict[tuple[type[JobKind] | None, object], list[TrainingRequest]] = {}
    for request in requests:
        kind, key = next(((k, key) for k in kinds if (key := k.key(request)) is not None), (None, request.name))
        groups.setdefault((kind, key), []).append(request)
    # All count as submitted just now, in the order of the file: ties are first come, first served.
    trainers: list[PlannedJob] = []
    notes: list[str] = []
    for age, ((kind, _), members) in zip(range(len(groups), 0, -1), groups.items(), strict=True):
        submitted = now - age * _TICK
        if kind is None or len(members) == 1:
            trainers.append(members[0].trainer(costs, submitted))
            continue
        trainer, note = kind.planned(len(notes) + 1, members, costs, submitted)
        trainers.append(trainer)
        notes.append(note)
    return trainers, notes


def _on_kinds(trainers: Iterable[PlannedJob], speeds: Mapping[str, float]) -> list[PlannedJob]:
    """Return the trainers with the curves that the executor assumes on each kind of node before it has measured any."""
    from freetrain_parsl.planning.curves.learning import Profile, best_rate_per_node, learned_on_kinds, relative_speeds

    trainers = list(trainers)
    stated = (curve for trainer in trainers for curve in (trainer.curve, *trainer.curves.values()))
    unit = best_rate_per_node(stated)
    ratios = relative_speeds(speeds, [])
    profiles = (
        {kind: Profile(trainer.curves.get(kind, trainer.curve)) for kind in speeds if trainer.may_use(kind)}
        for trainer in trainers
    )
    return [learned_on_kinds(one, those, ratios, unit) for one, those in zip(trainers, profiles, strict=True)]


def _stand_in(survey: Survey, costs: CostsInSeconds, kind: str) -> PlannedJob:
    """Make a training job that can use any number of nodes of a kind, each with the same value."""
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import PlannedJob

    most = max(2, sum(len(window.nodes) for window in survey.windows if window.node_kind == kind))
    curve = ScalingCurve({1: 1.0, most: float(most)}, relative=True)
    name, kinds = (f"{_STAND_IN}-{kind}", (kind,)) if kind else (_STAND_IN, ())
    return PlannedJob(name, 1, most, curve, costs, submitted=survey.time, node_kinds=kinds)


def _our_jobs(source: WindowSource) -> tuple[int, list[str], dict[str, str]]:
    """Return the number of our pending blocks, a note, and the job of each node that our blocks hold.

    Like the nodes of any job, those are in no window.
    """
    if isinstance(source, WindowsByKind):
        source = source.first
    jobs = set(source.find_jobs(_JOBS))
    if not jobs:
        return 0, [], {}
    # Blocks belong to a driver: this query must not pass for the driver's own survey, which may clean up after them.
    look: Callable[[], BatchState] | None = getattr(source, "state", None)
    if look is not None:
        state = look()
        pending = sum(job.job in jobs for job in state.pending)
        ours = [job for job in state.running if job.job in jobs]
        running = len(ours)
        held = {node: job.job for job in ours for node in job.nodes}
    else:
        blocks = source.survey(sorted(jobs)).blocks
        states = [status.state for status in blocks.values()]
        held = {node: job for job, status in blocks.items() for node in status.nodes}
        pending = sum(state in (BlockState.PENDING, BlockState.HELD) for state in states)
        running = states.count(BlockState.RUNNING)
    return pending, [f"your blocks: {running} running, {pending} waiting; their nodes are in no window"], held
