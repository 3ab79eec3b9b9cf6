"""What the planner would do now if it were started now: the planner itself answers, and nothing is submitted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.planning.model import BlockTerms, Decision, Trainer, Window
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.settings import PlannerSettings

__all__ = ["Preview", "Share", "preview"]


@dataclass(frozen=True)
class Share:
    """What one training gets in one block.

    Parameters
    ----------
    trainer
        Its name.
    nodes
        Its nodes of the block.
    node_seconds
        Of training there, once slots are ready and the training has started, until the nodes are vacated.
    samples
        That it would gain there; ``None`` if its scaling curve is relative.
    """

    trainer: str
    nodes: int
    node_seconds: float
    samples: float | None


@dataclass(frozen=True)
class Preview:
    """The planner's first answer.

    Parameters
    ----------
    requests
        Blocks that it would submit, in its order.
    shares
        For each of them who trains there, and what that gains; by name of the training.
    decision
        What the policy decided over all nodes that could be had; ``None`` if it was not asked, or refused.
    """

    requests: tuple[ev.RequestBlock, ...]
    shares: tuple[tuple[Share, ...], ...]
    decision: Decision | None


def preview(
    windows: Sequence[Window],
    trainers: Sequence[Trainer],
    policy: Policy,
    settings: PlannerSettings,
    terms: BlockTerms,
    now: float,
) -> Preview:
    """Ask a new planner what it would submit for trainings that hold nothing yet.

    The gain of a training is counted until its blocks end, less the start of the training, and no more than its work
    left. A window of unknown closing counts in full, though its nodes may be taken at any time.
    """
    decisions: list[Decision] = []

    def note(_time: float, purpose: str, decision: Decision) -> None:
        if purpose == "demand":
            decisions.append(decision)

    planner = Planner(policy, settings, on_decision=note)
    submitted = [ev.TrainerSubmitted(now, trainer) for trainer in trainers]
    actions = planner.advance(*submitted, ev.WindowsSeen(now, tuple(windows), terms))
    requests = tuple(action for action in actions if isinstance(action, ev.RequestBlock))
    decision = decisions[-1] if decisions else None
    return Preview(requests, tuple(_shares(requests, trainers, decision, settings)), decision)


def _shares(
    requests: Sequence[ev.RequestBlock],
    trainers: Iterable[Trainer],
    decision: Decision | None,
    settings: PlannerSettings,
) -> list[tuple[Share, ...]]:
    useful = [max(0.0, request.seconds - settings.startup - settings.closing_margin) for request in requests]
    shares: list[list[Share]] = [[] for _ in requests]
    for trainer in sorted(trainers, key=lambda trainer: trainer.name):
        nodes = decision.allocation.get(trainer.name, frozenset()) if decision is not None else frozenset()
        counts = [len(nodes.intersection(request.nodes)) for request in requests]
        node_seconds, samples = _gains(trainer, counts, useful)
        for index, count in enumerate(counts):
            if count:
                gain = None if trainer.curve.relative else samples[index]
                shares[index].append(Share(trainer.name, count, node_seconds[index], gain))
    return [tuple(items) for items in shares]


def _gains(
    trainer: Trainer, counts: Sequence[int], useful: Sequence[float]
) -> tuple[defaultdict[int, float], defaultdict[int, float]]:
    """Block -> node-seconds of training, and samples; those of several blocks at once are shared by nodes."""
    node_seconds: defaultdict[int, float] = defaultdict(float)
    samples: defaultdict[int, float] = defaultdict(float)
    begin, starting = 0.0, trainer.costs.start
    for end in sorted({length for length, count in zip(useful, counts, strict=True) if count}):
        alive = [index for index, count in enumerate(counts) if count and useful[index] >= end]
        total = sum(counts[index] for index in alive)
        if total >= trainer.min_nodes:
            seconds = end - begin - starting  # the start is paid once, where training begins
            starting = 0.0
            for index in alive:
                node_seconds[index] += seconds * counts[index]
                samples[index] += seconds * trainer.rate(total) * counts[index] / total
        begin = end
    done = sum(samples.values())
    if done > trainer.work_left:
        for gains in (node_seconds, samples):
            for index in gains:
                gains[index] *= trainer.work_left / done
    return node_seconds, samples
