"""What the planner would do if it were started now: a dry run of the planner itself; nothing is submitted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from freetrain_parsl.planning.model import BlockTerms, Decision, Trainer, Window
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.settings import SettingsInSeconds

__all__ = ["Preview", "Share", "preview"]


@dataclass(frozen=True)
class Share:
    """A training's share of a block.

    Parameters
    ----------
    trainer
        Its name.
    nodes
        Number of its nodes in the block.
    node_seconds
        Node-seconds of training there, from when slots are ready and the training has started until the nodes are
        vacated.
    samples
        Samples that it would process there; ``None`` if its scaling curve is relative.
    """

    trainer: str
    nodes: int
    node_seconds: float
    samples: float | None


@dataclass(frozen=True)
class Preview:
    """The planner's first decision.

    Parameters
    ----------
    requests
        Blocks that it would submit, in this order.
    shares
        For each block, the trainings that would run there and their gains; in order of the training's name.
    decision
        The policy's decision over all obtainable nodes; ``None`` if it was not called or its answer was rejected.
    """

    requests: tuple[ev.RequestBlock, ...]
    shares: tuple[tuple[Share, ...], ...]
    decision: Decision | None


def preview(
    windows: Sequence[Window],
    trainers: Sequence[Trainer],
    policy: Policy,
    settings: SettingsInSeconds,
    terms: BlockTerms,
    now: float,
    terms_by_kind: Mapping[str, BlockTerms] = MappingProxyType({}),
) -> Preview:
    """Determine what a new planner would submit for trainings that hold no nodes yet.

    The gain of a training is counted until its blocks end, less the cost of its start, and at most its work left. A
    window of unknown closing counts in full, although its nodes may be taken at any time.
    """
    decisions: list[Decision] = []

    def note(_time: float, purpose: str, decision: Decision) -> None:
        if purpose == "demand":
            decisions.append(decision)

    planner = Planner(policy, settings, on_decision=note)
    submitted = [ev.TrainerSubmitted(now, trainer) for trainer in trainers]
    actions = planner.advance(*submitted, ev.WindowsSeen(now, tuple(windows), terms, terms_by_kind))
    requests = tuple(action for action in actions if isinstance(action, ev.RequestBlock))
    decision = decisions[-1] if decisions else None
    return Preview(requests, tuple(_shares(requests, trainers, decision, settings)), decision)


def _shares(
    requests: Sequence[ev.RequestBlock],
    trainers: Iterable[Trainer],
    decision: Decision | None,
    settings: SettingsInSeconds,
) -> list[tuple[Share, ...]]:
    useful = [max(0.0, request.seconds - settings.startup - settings.closing_margin) for request in requests]
    shares: list[list[Share]] = [[] for _ in requests]
    for trainer in sorted(trainers, key=lambda trainer: trainer.name):
        nodes = decision.allocation.get(trainer.name, frozenset()) if decision is not None else frozenset()
        counts = [len(nodes.intersection(request.nodes)) for request in requests]
        here = next((trainer.on_kind(r.window.node_kind) for r, n in zip(requests, counts, strict=True) if n), trainer)
        node_seconds, samples = _gains(here, counts, useful)
        for index, count in enumerate(counts):
            if count:
                gain = None if here.curve.relative else samples[index]
                shares[index].append(Share(trainer.name, count, node_seconds[index], gain))
    return [tuple(items) for items in shares]


def _gains(
    trainer: Trainer, counts: Sequence[int], useful: Sequence[float]
) -> tuple[defaultdict[int, float], defaultdict[int, float]]:
    """Return block -> node-seconds of training, and samples; concurrent blocks share both by number of nodes."""
    node_seconds: defaultdict[int, float] = defaultdict(float)
    samples: defaultdict[int, float] = defaultdict(float)
    begin, starting = 0.0, trainer.costs.start
    for end in sorted({length for length, count in zip(useful, counts, strict=True) if count}):
        alive = [index for index, count in enumerate(counts) if count and useful[index] >= end]
        total = sum(counts[index] for index in alive)
        if total >= trainer.min_nodes:
            seconds = end - begin - starting  # the start is charged once, where training begins
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
