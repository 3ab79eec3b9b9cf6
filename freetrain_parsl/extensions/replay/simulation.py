"""The planner driven by a recorded log: how a policy would have used the idle nodes.

The planner is the same as in the executor; time is the log's. Idle nodes belong to its pool as soon as they are idle
and until they are used again, and it decides whenever nodes open or close, or a trainer is submitted or done. With
`BlockSettings`, it must request them as blocks, which take time to start, and it decides whenever the executor would.
"""

from __future__ import annotations

import math
import time as wall_clock
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.accounts import Account, Bins, Losses
from freetrain_parsl.extensions.replay.block_site import BlockSite
from freetrain_parsl.places import node_of
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.learning import Profile, learned
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PoolNode
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.settings import PlannerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from freetrain_parsl.extensions.replay.block_site import BlockSettings
    from freetrain_parsl.extensions.replay.holes import Change, HoleLog
    from freetrain_parsl.extensions.replay.ideal import BestRates, Idle
    from freetrain_parsl.planning.model import Decision, PlannedJob
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["Cost", "Curves", "Knowledge", "Outcome", "Replay", "ReplaySettings", "replay"]

_PLANNER = PlannerSettings(closing_margin=timedelta(0), settle=timedelta(0), replan_interval=timedelta.max).in_seconds()
_IDLE = "idle"  # the one block that all idle nodes belong to


class Knowledge(str, Enum):
    """The planner's knowledge of closings."""

    NONE = "none"
    ESTIMATED = "estimated"
    """The batch system's plan at the time, from requested walltimes and its queue: which nodes a job will need or
    should already have. The planned times are inaccurate, and the planner learns how reliable such plans are."""
    PERFECT = "perfect"
    """The actual closings of the idle nodes."""


class Cost(str, Enum):
    """Which changes are charged."""

    PAPER = "paper"
    FULL = "full"
    """Starts are charged too."""


class Curves(str, Enum):
    """The planner's knowledge of scaling curves."""

    KNOWN = "known"
    LEARNED = "learned"
    """None; it learns them from measurements, as of training jobs with ``scaling="learn"``."""
    DEFAULT = "default"
    """None; it assumes the default curve for all, and does not learn."""


@dataclass(frozen=True)
class ReplaySettings:
    """How to replay.

    Parameters
    ----------
    knowledge, cost, curves
        See the respective classes.
    start_seconds
        Cost of a start with `Cost.FULL`, for trainers whose own start cost is zero.
    concurrent
        How many trainers may be in the decision, first come, first served; ``None`` for all.
    blocks
        Idle nodes must be requested as blocks, as in the executor; ``None``: they are in the pool while they are idle.
    slots_per_node
        Of nodes that jobs share: the log's nodes are then their slots, see `SlotLog`. 1: whole nodes.
    """

    knowledge: Knowledge = Knowledge.NONE
    cost: Cost = Cost.PAPER
    curves: Curves = Curves.KNOWN
    start_seconds: float = 30.0
    concurrent: int | None = None
    blocks: BlockSettings | None = None
    slots_per_node: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_seconds) and self.start_seconds >= 0):
            raise InvalidSettings(f"the cost of a start must be zero or more seconds, got {self.start_seconds}")
        if self.concurrent is not None and self.concurrent < 1:
            raise InvalidSettings(f"at least one trainer must be in the decision, got {self.concurrent}")


@dataclass
class Outcome:
    """The result of a replay.

    Parameters
    ----------
    value
        Value of the samples processed, less the cost of changes.
    losses
        Cost of changes, in units of value.
    unused
        Value that idle nodes without a trainer could have produced.
    idle_seconds, used_seconds
        Node-seconds.
    events
        Instants at which nodes opened or closed, or a trainer was submitted or done.
    decisions
        The policy's decisions without the allocations: (solve seconds, proven optimal).
    refused
        Decisions that violated the contract of policies.
    blocks, preempted_blocks
        Blocks that were requested, and of these, that were preempted.
    bins
        ``idle`` (node-seconds) and ``value`` over time.
    trainer_bins
        Node-seconds of each trainer over time, by name.
    """

    bins: Bins
    trainer_bins: Bins
    value: float = 0.0
    losses: Losses = field(default_factory=Losses)
    unused: float = 0.0
    idle_seconds: float = 0.0
    used_seconds: float = 0.0
    events: int = 0
    decisions: list[tuple[float, bool]] = field(default_factory=list)
    refused: int = 0
    blocks: int = 0
    preempted_blocks: int = 0
    accounts: list[Account] = field(default_factory=list)
    wall_seconds: float = 0.0


def replay(
    log: HoleLog,
    rates: BestRates,
    policy: Policy,
    settings: ReplaySettings | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Replay a log with a policy; `on_progress` gets the time reached on the log's clock.

    Raises
    ------
    InvalidSettings
        Forecasts are requested from a log that has none.
    """
    return Replay(log, rates, policy, settings or ReplaySettings(), on_progress).run()


class Replay:
    """One replay; the parameters are those of `replay`."""

    def __init__(
        self,
        log: HoleLog,
        rates: BestRates,
        policy: Policy,
        settings: ReplaySettings,
        on_progress: Callable[[float], None] | None,
    ) -> None:
        self._log = log
        self._best = rates
        self._settings = settings
        self._on_progress = on_progress
        blocks = settings.blocks
        perfect = settings.knowledge is Knowledge.PERFECT
        self._site = None if blocks is None else BlockSite(blocks, log.start, perfect=perfect)
        self._planner = Planner(
            policy,
            _PLANNER if blocks is None else blocks.planner.in_seconds(),
            self._decided,
            settings.slots_per_node,
        )
        self._outcome = Outcome(Bins(log.start, log.end), Bins(log.start, log.end))
        self._accounts = {
            trainer.name: Account(trainer, log.start + trainer.submitted, self._weight(trainer), kinds=log.kinds)
            for trainer in rates.trainers
        }
        self._index = {trainer.name: index for index, trainer in enumerate(rates.trainers)}
        self._waiting = deque(sorted(self._accounts.values(), key=lambda account: account.submitted))
        self._alive: dict[str, Account] = {}
        self._profiles: dict[str, Profile] = {}
        self._owners: dict[str, str] = {}
        self._idle_by_kind = dict.fromkeys(rates.kinds, 0)
        self._now = log.start

    def run(self) -> Outcome:
        """Process the log once."""
        began = wall_clock.perf_counter()
        for number, change in enumerate(self._log.changes(forecasts=self._settings.knowledge is Knowledge.ESTIMATED)):
            self._advance(change.time)
            self._step(change)
            if self._on_progress is not None and number % 50 == 0:
                self._on_progress(change.time)
        outcome = self._close()
        outcome.wall_seconds = wall_clock.perf_counter() - began
        return outcome

    def _close(self) -> Outcome:
        """Advance to the end of the log and complete the outcome."""
        self._advance(self._log.end)
        self._finish()
        outcome = self._outcome
        outcome.accounts = list(self._accounts.values())
        outcome.refused = self._planner.statistics.refused
        if self._site is not None:
            outcome.blocks, outcome.preempted_blocks = self._site.requested, self._site.preempted
        return outcome

    def _weight(self, trainer: PlannedJob) -> float:
        """Return the value of a sample: the objective is proportional to the rate."""
        if (kind := self._best.kinds[0]) != "":
            trainer = trainer.on_kind(kind)  # a sample is worth the same on all kinds
        nodes = next((n for n, rate in trainer.curve.points if n >= trainer.min_nodes and rate > 0), trainer.max_nodes)
        nodes = min(nodes, trainer.max_nodes)
        rate = trainer.rate(nodes)
        return self._best.objective(trainer, nodes) / rate if rate > 0 else 0.0

    def _decided(self, _time: float, _purpose: str, decision: Decision) -> None:
        self._outcome.decisions.append((decision.solve_seconds, decision.proven_optimal))

    # Time.

    def _advance(self, until: float) -> None:
        """Advance time; submit and finish trainers on the way."""
        while (time := self._next_event()) < until:
            self._pass_to(time)
            self._step()
        self._pass_to(until)

    def _next_event(self) -> float:
        """Return when something happens next unless the log changes before."""
        ends = min((account.done_at(self._now) for account in self._alive.values()), default=math.inf)
        submits = self._waiting[0].submitted if self._waiting and self._room() else math.inf
        return max(self._now, min(ends, submits, self._next_timer()))

    def _next_timer(self) -> float:
        """Return when blocks or the planner need a step next; without blocks, only changes and trainers count."""
        return math.inf if self._site is None else min(self._site.next_event, self._planner.wake_at(self._now))

    def _room(self) -> bool:
        concurrent = self._settings.concurrent
        return concurrent is None or len(self._alive) < concurrent

    def _pass_to(self, target: float) -> None:
        seconds = target - self._now
        if seconds <= 0:
            return
        outcome = self._outcome
        used, value = dict.fromkeys(self._idle_by_kind, 0), 0.0
        for name, account in self._alive.items():
            if not account.nodes:
                continue
            account.run(seconds)
            used[self._kind(next(iter(account.nodes)))] += len(account.nodes)
            value += account.weight * account.rate
            outcome.trainer_bins.add_rate(self._shown_as(name), self._now, target, len(account.nodes))
            if name in self._profiles:
                self._profiles[name].observe(len(account.nodes), account.rate * seconds, seconds)
        outcome.value += value * seconds
        outcome.idle_seconds += self._idle * seconds
        outcome.used_seconds += sum(used.values()) * seconds
        outcome.bins.add_rate("idle", self._now, target, self._idle)
        outcome.bins.add_rate("value", self._now, target, value)
        if used != self._idle_by_kind:
            outcome.unused += seconds * self._value_of_unused(tuple(used.values()))
        self._now = target

    def _shown_as(self, name: str) -> str:
        """Return the name under which the nodes of a trainer are counted over time."""
        return name

    @property
    def _idle(self) -> int:
        return sum(self._idle_by_kind.values())

    def _kind(self, node: str) -> str:
        return self._log.kinds.get(node, "")

    def _value_of_unused(self, used: Idle) -> float:
        """Return the value per second that the idle nodes could add to that of the `used` ones."""
        alive = frozenset(self._index[name] for name in self._alive)
        return self._best(alive, tuple(self._idle_by_kind.values())) - self._best(alive, used)

    # Events.

    def _take(self, change: Change) -> list[ev.Event]:
        """Convert a change in the log to events for the planner."""
        for hole in change.opened:
            self._idle_by_kind[self._kind(hole.node)] += 1
        for node in change.closed:
            self._idle_by_kind[self._kind(node)] -= 1
        events: list[ev.Event] = []
        if self._site is not None:
            self._preempt(self._site.change(change))
        elif change.closed:
            self._preempt(change.closed)
            events.append(ev.NodesLeft(self._now, change.closed))
        if change.opened and self._site is None:
            perfect = self._settings.knowledge is Knowledge.PERFECT
            shared = self._settings.slots_per_node > 1
            nodes = tuple(
                PoolNode(
                    hole.node,
                    hole.end if perfect else None,
                    host=node_of(hole.node) if shared else "",
                    node_kind=self._kind(hole.node),
                )
                for hole in change.opened
            )
            events.append(ev.NodesJoined(self._now, _IDLE, nodes))
        if change.expected is not None:
            events.append(ev.NodesForecast(self._now, change.expected, change.due))
        return events

    def _preempt(self, closed: Iterable[str]) -> None:
        lost: dict[str, set[str]] = {}
        for node in closed:
            if (owner := self._owners.pop(node, None)) is not None:
                lost.setdefault(owner, set()).add(node)
        for name, nodes in lost.items():
            cost = self._alive[name].preempt(frozenset(nodes))
            self._outcome.losses.preemption += cost
            self._spend(cost)

    def _step(self, change: Change | None = None) -> None:
        """Pass the events of this instant to the planner and apply its decisions."""
        self._outcome.events += change is None or bool(change.opened or change.closed)
        events = self._finish()  # first: a trainer that is done when its nodes are taken pays nothing
        events += [] if change is None else self._take(change)
        if self._site is not None:
            due, lost = self._site.pass_to(self._now)
            self._preempt(lost)
            events += [*due, ev.Tick(self._now)]
        events += self._submit()
        events += self._learn()
        for name, account in self._alive.items():
            if math.isfinite(account.trainer.work_left):
                events.append(ev.TrainerProgressed(self._now, name, account.work_left))
        if events:
            actions = self._planner.advance(*events)
            self._reassign()
            if self._site is not None:
                self._site.act(actions, self._now)
                self._site.leave_in_time(self._owners, self._now)

    def _finish(self) -> list[ev.Event]:
        done = [account for account in self._alive.values() if account.done(self._now)]
        return [self._end(account) for account in done]

    def _end(self, account: Account) -> ev.Event:
        """Remove a trainer that is done."""
        account.finished = self._now
        for node in account.nodes:
            del self._owners[node]
        account.stop()
        del self._alive[account.trainer.name]
        self._profiles.pop(account.trainer.name, None)
        return ev.TrainerFinished(self._now, account.trainer.name)

    def _submit(self) -> Iterable[ev.Event]:
        while self._waiting and self._room() and self._waiting[0].submitted <= self._now:
            account = self._waiting.popleft()
            trainer = account.trainer
            self._alive[trainer.name] = account
            if self._settings.curves is Curves.LEARNED:
                self._profiles[trainer.name] = Profile()
            yield ev.TrainerSubmitted(self._now, self._described(trainer))

    def _described(self, trainer: PlannedJob) -> PlannedJob:
        """Return the trainer as the planner sees it: times on the log's clock, and costs as charged."""
        costs = replace(trainer.costs, start=self._start_seconds(trainer))
        deadline = None if trainer.deadline is None else self._log.start + trainer.deadline
        submitted = self._log.start + trainer.submitted
        if self._settings.curves is Curves.DEFAULT:
            trainer = replace(trainer, curve=ScalingCurve.default())
        return replace(trainer, costs=costs, deadline=deadline, submitted=submitted)

    def _start_seconds(self, trainer: PlannedJob) -> float:
        return (trainer.costs.start or self._settings.start_seconds) if self._settings.cost is Cost.FULL else 0.0

    def _learn(self) -> Iterable[ev.Event]:
        if not self._profiles:
            return []
        trainers = [self._described(account.trainer) for account in self._alive.values()]
        slots = self._settings.slots_per_node
        return [ev.TrainerLearned(self._now, trainer) for trainer in learned(trainers, self._profiles, slots)]

    def _reassign(self) -> None:
        assigned = self._planner.assigned
        taken: dict[str, str] = {}
        for name, account in self._alive.items():
            nodes = assigned.get(name, frozenset())
            if nodes == account.nodes:
                continue
            for node in account.nodes - nodes:
                if self._owners.get(node) == name:
                    del self._owners[node]
            taken.update((node, name) for node in nodes - account.nodes)
            losses = self._outcome.losses
            if account.nodes:
                cost = account.rescale(nodes)
                losses.rescale += cost
            else:
                cost = account.start(nodes, self._now, self._start_seconds(account.trainer))
                losses.start += cost
            self._spend(cost)
        self._owners.update(taken)

    def _spend(self, cost: float) -> None:
        if cost:
            self._outcome.value -= cost
            self._outcome.bins.add("value", self._now, -cost)
