"""Explains what the planner would do if it started now, and why a window is used or not, from its own rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from freetrain_parsl.places import node_of, slots_of
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.blocks import why_not
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.sizes import round_up

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from freetrain_parsl.planning.model import BlockTerms, Decision, PlannedJob, Window
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.settings import SettingsInSeconds
    from freetrain_parsl.planning.sizes import AllowedCounts

__all__ = ["Explanation", "Preview", "Share", "Verdict", "explain_windows", "least_size", "preview", "why_free"]


@dataclass(frozen=True)
class Share:
    """A training job's share of a block.

    Parameters
    ----------
    trainer
        Its name.
    nodes
        Number of the block's nodes that it has, or has slots of.
    node_seconds
        Node-seconds of training there, from when slots are ready and the training job has started until the nodes are
        vacated; a slot is its part of a node.
    samples
        Samples that it would process there; ``None`` if its scaling curve is relative.
    slots
        Number of its slots in the block; ``None`` where jobs have whole nodes.
    """

    trainer: str
    nodes: int
    node_seconds: float
    samples: float | None
    slots: int | None = None


@dataclass(frozen=True)
class Preview:
    """The planner's first decision.

    Parameters
    ----------
    requests
        Blocks that it would submit, in this order.
    shares
        For each block, the training jobs that would run there and their gains; in order of the training job's name.
    decision
        The policy's decision over all obtainable nodes; ``None`` if it was not called or its answer was rejected.
    """

    requests: tuple[ev.RequestBlock, ...]
    shares: tuple[tuple[Share, ...], ...]
    decision: Decision | None


def preview(
    windows: Sequence[Window],
    trainers: Sequence[PlannedJob],
    policy: Policy,
    settings: SettingsInSeconds,
    terms: BlockTerms,
    now: float,
    terms_by_kind: Mapping[str, BlockTerms] = MappingProxyType({}),
    slots_per_node: int = 1,
) -> Preview:
    """Determine what a new planner would submit for training jobs that hold no nodes yet.

    The gain of a training job is counted until its blocks end, less the cost of its start, and at most its work left. A
    window of unknown closing counts in full, although its nodes may be taken at any time. `slots_per_node` is as for
    `Planner`: where jobs share nodes, the sizes of the training jobs are in slots.
    """
    decisions: list[Decision] = []

    def note(_time: float, purpose: str, decision: Decision) -> None:
        if purpose == "demand":
            decisions.append(decision)

    planner = Planner(policy, replace(settings, standby_blocks=0), note, slots_per_node)
    submitted = [ev.TrainerSubmitted(now, trainer) for trainer in trainers]
    actions = planner.advance(*submitted, ev.WindowsSeen(now, tuple(windows), terms, terms_by_kind))
    requests = tuple(action for action in actions if isinstance(action, ev.RequestBlock))
    decision = decisions[-1] if decisions else None
    return Preview(requests, tuple(_shares(requests, trainers, decision, settings, slots_per_node)), decision)


def _shares(
    requests: Sequence[ev.RequestBlock],
    trainers: Iterable[PlannedJob],
    decision: Decision | None,
    settings: SettingsInSeconds,
    slots_per_node: int,
) -> list[tuple[Share, ...]]:
    useful = [max(0.0, request.seconds - settings.startup - settings.closing_margin) for request in requests]
    shares: list[list[Share]] = [[] for _ in requests]
    for trainer in sorted(trainers, key=lambda trainer: trainer.name):
        units = decision.allocation.get(trainer.name, frozenset()) if decision is not None else frozenset()
        held = Counter(map(node_of, units))
        counts = [sum(held[node] for node in request.nodes) for request in requests]
        here = next((trainer.on_kind(r.window.node_kind) for r, n in zip(requests, counts, strict=True) if n), trainer)
        unit_seconds, samples = _gains(here, counts, useful)
        for index, count in enumerate(counts):
            if count:
                gain = None if here.curve.relative else samples[index]
                nodes = len(held.keys() & set(requests[index].nodes))
                slots = count if slots_per_node > 1 else None
                shares[index].append(Share(trainer.name, nodes, unit_seconds[index] / slots_per_node, gain, slots))
    return [tuple(items) for items in shares]


def _gains(
    trainer: PlannedJob, counts: Sequence[int], useful: Sequence[float]
) -> tuple[defaultdict[int, float], defaultdict[int, float]]:
    """Return block -> seconds of training times units, and samples; concurrent blocks share both by number of units."""
    unit_seconds: defaultdict[int, float] = defaultdict(float)
    samples: defaultdict[int, float] = defaultdict(float)
    begin, starting = 0.0, trainer.costs.start
    for end in sorted({length for length, count in zip(useful, counts, strict=True) if count}):
        alive = [index for index, count in enumerate(counts) if count and useful[index] >= end]
        total = sum(counts[index] for index in alive)
        if total >= trainer.min_nodes:
            seconds = end - begin - starting  # the start is charged once, where training begins
            starting = 0.0
            for index in alive:
                unit_seconds[index] += seconds * counts[index]
                samples[index] += seconds * trainer.rate(total) * counts[index] / total
        begin = end
    done = sum(samples.values())
    if done > trainer.work_left:
        for gains in (unit_seconds, samples):
            for index in gains:
                gains[index] *= trainer.work_left / done
    return unit_seconds, samples


@dataclass(frozen=True)
class Verdict:
    """Whether a window would be used.

    Parameters
    ----------
    window
        The window.
    used
        Names of its nodes for which blocks would be submitted.
    why
        Why the others are not used, in plain English; empty if all are used.
    """

    window: Window
    used: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Explanation:
    """The planner's next requests, and a verdict for each window, in the order of the windows.

    `free_slots` says which slots of the requested nodes no training job has although some wait, and why; else it is
    empty, as where jobs have whole nodes.
    """

    plan: Preview
    verdicts: tuple[Verdict, ...]
    free_slots: str = ""


def explain_windows(
    windows: Sequence[Window],
    trainers: Sequence[PlannedJob],
    policy: Policy,
    settings: SettingsInSeconds,
    terms: BlockTerms,
    now: float,
    pending: int = 0,
    terms_by_kind: Mapping[str, BlockTerms] = MappingProxyType({}),
    slots_per_node: int = 1,
) -> Explanation:
    """Explain what a planner would do with each window if it were started now, for training jobs that hold no nodes.

    Windows and terms are from a survey of the batch system; `pending` blocks of ours are already pending.
    `slots_per_node` is as for `preview`.

    Raises
    ------
    InvalidApp
        Two trainers have the same name.
    """
    left = settings.max_pending_blocks - pending
    if left < 1:
        plan = Preview((), (), None)
    else:
        settings = replace(settings, max_pending_blocks=left)
        plan = preview(windows, trainers, policy, settings, terms, now, terms_by_kind, slots_per_node)
    reasons = _Reasons(
        plan, trainers, policy, settings, terms, terms_by_kind, now, pending, full=left < 1, units=slots_per_node
    )
    reasons.count_left(windows)
    used = {name for request in plan.requests for name in request.nodes}
    verdicts = []
    for window in windows:
        taken = tuple(name for name in window.nodes if name in used)
        verdicts.append(Verdict(window, taken, "" if len(taken) == len(window.nodes) else reasons.why(window, taken)))
    return Explanation(plan, tuple(verdicts), reasons.free_slots(used))


def least_size(least: int, allowed: AllowedCounts, slots: int) -> int:
    """Return the smallest number of at least `least` slots that is allowed and a size; zero if there is none.

    Parameters
    ----------
    least
        Slots.
    allowed
        The numbers on which the model can run.
    slots
        Of a node.
    """
    count = allowed.at_least(least)
    while count and (size := round_up(count, slots)) != count:
        count = allowed.at_least(size)
    return count


def why_free(free: Collection[str], waiting: Mapping[str, int], slots_per_node: int) -> str:
    """Explain why none of the waiting training jobs can use the free slots of nodes that jobs share.

    Parameters
    ----------
    free
        Names of the slots.
    waiting
        Training job -> its least number of slots, see `least_size`; those that can have none are left out.
    slots_per_node
        Number of slots of a node.

    Returns
    -------
    str
        What the one that needs the fewest lacks, in plain English; empty: one of them can use them, there is none, or
        no slot is free.
    """
    if not (free and waiting):
        return ""
    by_node = Counter(map(node_of, free))
    whole = sum(count == slots_per_node for count in by_node.values())
    name = min(waiting, key=lambda name: (waiting[name], name))
    size = waiting[name]
    if size <= max(by_node.values()) or size <= whole * slots_per_node:
        return ""
    if size < slots_per_node:
        return f"training job {name!r} needs {size} on one node, where at most {_are(max(by_node.values()))} free"
    number = size // slots_per_node
    needs = "a whole node" if number == 1 else f"{number} whole nodes"
    return f"training job {name!r} needs {needs}, {_are(whole)} free"


@dataclass
class _Reasons:
    """Finds the first of the planner's reasons that applies."""

    plan: Preview
    trainers: Sequence[PlannedJob]
    policy: Policy
    settings: SettingsInSeconds
    terms: BlockTerms
    terms_by_kind: Mapping[str, BlockTerms]
    now: float
    pending: int
    full: bool
    units: int
    """Slots of a node, if jobs share nodes; 1: jobs have whole nodes."""
    left: Counter[str] = field(default_factory=Counter)
    """Kind -> units of the nodes that could be obtained and are not needed."""

    def __post_init__(self) -> None:
        allocation = {} if self.plan.decision is None else self.plan.decision.allocation
        self._counts = {trainer.name: len(allocation.get(trainer.name, ())) for trainer in self.trainers}
        self._units_chosen = frozenset().union(*allocation.values())
        self._chosen = frozenset(map(node_of, self._units_chosen))

    def free_slots(self, used: Iterable[str]) -> str:
        """Explain why slots of the nodes that would be `used` stay free; empty: none does, or nothing waits."""
        if self.units == 1:
            return ""
        free = {slot for node in used for slot in slots_of(node, self.units)} - self._units_chosen
        idle = [trainer for trainer in self.trainers if not self._counts[trainer.name]]
        waiting = {trainer.name: size for trainer in idle if (size := trainer.at_least(0, self.units))}
        why = why_free(free, waiting, self.units)
        return f"{self._amount(len(free))} of these nodes would be free: {why}" if why else ""

    def count_left(self, windows: Iterable[Window]) -> None:
        """Count the nodes that could be obtained and are not needed."""
        for window in windows:
            if self._rule(window) is None:
                self.left[window.node_kind] += self.units * sum(node not in self._chosen for node in window.nodes)

    def why(self, window: Window, used: tuple[str, ...]) -> str:
        """Explain why the nodes of a window that are not in `used` are not requested."""
        if (reason := self._rule(window)) is not None:
            return reason
        if not self.trainers:
            return "no training job waits for nodes"
        if self.full:
            return f"{_blocks(self.pending)} already {_wait(self.pending)} in the queue, the maximum"
        if self.plan.decision is None:
            return f"policy {self.policy.name!r} gave no valid answer; its error is in the log"
        if wanted := len(self._chosen.intersection(window.nodes)) - len(used):
            return self._why_not_requested(window, wanted)
        usable = [trainer for trainer in self.trainers if trainer.may_use(window.node_kind)]
        if not usable:
            return f"no training job may run on nodes of kind {window.node_kind!r}"
        left = self.left[window.node_kind]
        if not any(self._grows(trainer, left) for trainer in usable):
            return self._why_nobody_grows(usable, left)
        return self._why_not_chosen(window, used)

    def _rule(self, window: Window) -> str | None:
        return why_not(window, self.settings, self._terms_on(window), self.now)

    def _terms_on(self, window: Window) -> BlockTerms:
        return self.terms_by_kind.get(window.node_kind, self.terms)

    def _grows(self, trainer: PlannedJob, left: int) -> bool:
        """Return whether `left` unused units would be enough for a training job to start or to grow."""
        return 0 < self._next(trainer) <= self._counts[trainer.name] + left

    def _next(self, trainer: PlannedJob) -> int:
        """Return the smallest number of units that a training job may have beyond those chosen; zero if none."""
        return trainer.at_least(self._counts[trainer.name] + 1, self.units)

    def _why_nobody_grows(self, usable: Sequence[PlannedJob], left: int) -> str:
        idle = [trainer for trainer in usable if not self._counts[trainer.name]]
        if idle:
            sizes = {trainer.name: self._next(trainer) or trainer.min_nodes for trainer in idle}
            least = min(sizes, key=lambda name: (sizes[name], name))
            others = "; the others have all that they can use" if len(idle) < len(usable) else ""
            needed = self._amount(sizes[least])
            return f"training job {least!r} needs at least {needed}, {_are(left)} left{others}"
        growing = [trainer for trainer in usable if self._next(trainer)]
        if growing:
            nearest = min(growing, key=lambda each: (self._next(each) - self._counts[each.name], each.name))
            has = self._counts[nearest.name]
            return (
                f"training job {nearest.name!r} has {self._amount(has)}, the next number that its model or the sizes "
                f"on a node allow is {self._next(nearest)}, and {_are(left)} left"
            )
        most = sum(self._counts[trainer.name] for trainer in usable)
        return f"no training job can use more {self._unit}s: at most {most} together"

    @property
    def _unit(self) -> str:
        return "node" if self.units == 1 else "accelerator"

    def _amount(self, number: int) -> str:
        return f"{number} {self._unit}{'' if number == 1 else 's'}"

    def _why_not_requested(self, window: Window, wanted: int) -> str:
        waiting = len(self.plan.requests) + self.pending
        if len(self.plan.requests) >= self.settings.max_pending_blocks:
            return f"{_blocks(waiting)} then {_wait(waiting)} in the queue, the maximum; longer windows take precedence"
        return (
            f"{_nodes(wanted)} of it {'is' if wanted == 1 else 'are'} wanted, "
            f"fewer than the minimum of {self._terms_on(window).min_nodes} per job"
        )

    def _why_not_chosen(self, window: Window, used: tuple[str, ...]) -> str:
        decision = self.plan.decision
        stopped = decision is not None and not decision.proven_optimal
        doubt = "; it reached its time_limit before it could prove this" if stopped else ""
        if used:
            return f"policy {self.policy.name!r} finds that more nodes would gain nothing{doubt}"
        terms = self._terms_on(window)
        alone = preview([window], self.trainers, self.policy, self.settings, terms, self.now, slots_per_node=self.units)
        if alone.requests:
            full = len(self.plan.requests) >= self.settings.max_pending_blocks
            limit = f", and only {_blocks(len(self.plan.requests) + self.pending)} may wait" if full else ""
            return f"policy {self.policy.name!r} finds other windows worth more{limit}{doubt}"
        usable = [trainer for trainer in self.trainers if trainer.may_use(window.node_kind)]
        least = min(usable, key=lambda trainer: (trainer.min_nodes, trainer.name))
        if least.min_nodes > self.units * len(window.nodes):
            return f"training job {least.name!r} needs at least {self._amount(least.min_nodes)}, more than are here"
        return f"policy {self.policy.name!r} finds that no training job would gain from it{doubt}"


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _are(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'}"


def _wait(number: int) -> str:
    return "waits" if number == 1 else "wait"
