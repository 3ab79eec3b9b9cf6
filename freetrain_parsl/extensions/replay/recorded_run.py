"""A live run as its planner saw it, from the journal: what happened, what it decided, and the same decisions again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.extensions.replay.holes import HoleLog, HoleTable, refuse_forecasts
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.settings import SettingsInSeconds
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import restored, restored_progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.replay.holes import Change
    from freetrain_parsl.planning.model import Decision, PlannedJob
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["JournalLog", "RecordedRun", "Solve", "Step", "decide_again", "read_run", "trainers_of"]


@dataclass(frozen=True)
class Solve:
    """A decision of the policy, as the journal has it; `purpose`: ``assign`` or ``demand``."""

    purpose: str
    counts: Mapping[str, int]
    objective: float
    proven: bool


@dataclass(frozen=True)
class Step:
    """A step of the planner, with what it was given and returned; times in seconds since the epoch."""

    time: float
    events: tuple[ev.Event, ...]
    actions: tuple[ev.Action, ...]
    solves: tuple[Solve, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded."""

    policy: str
    settings: SettingsInSeconds
    steps: tuple[Step, ...]
    slots_per_node: int = 1
    """As for `Planner`."""


def read_run(journal: Path) -> RecordedRun:
    """Read the planner's steps from a journal, also from one that is being written.

    Raises
    ------
    InvalidInput
        The journal does not begin with a planner of this version.
    """
    started: record.PlannerStarted | None = None
    steps: list[Step] = []
    solves: list[Solve] = []
    seen = ev.WindowsSeen(0.0, ())
    for _, entry in read_journal(journal):
        match entry.record:
            case record.PlannerStarted() as started:
                pass
            case record.Decision(subject=purpose, counts=counts, objective=objective, proven=proven):
                solves.append(Solve(purpose, counts, objective, proven))
            case record.PlannerStep(events=events, actions=actions):
                received: list[ev.Event] = []
                for item in events:
                    if progress := restored_progress(item):
                        received += progress
                        continue
                    event = _event(item, seen)
                    if isinstance(event, ev.WindowsSeen):
                        seen = event
                    received.append(event)
                steps.append(Step(entry.time, tuple(received), tuple(map(restored, actions)), tuple(solves)))
                solves.clear()
    if started is None:
        raise InvalidInput(f"{journal}: it has no steps of a planner; give the journal of a run of this version")
    return RecordedRun(started.policy, SettingsInSeconds(**started.settings), tuple(steps), started.slots_per_node)


def decide_again(run: RecordedRun, policy: Policy) -> Iterator[Step]:
    """Give a new planner the events of a run, step by step; yield the steps with its actions and decisions.

    With the policy of the run, they equal the recorded ones, provided that each solve ended before its time limit.
    """
    solves: list[Solve] = []

    def solved(_time: float, purpose: str, decision: Decision) -> None:
        solves.append(Solve(purpose, decision.counts, decision.objective, decision.proven_optimal))

    planner = Planner(policy, run.settings, solved, run.slots_per_node)
    for step in run.steps:
        solves.clear()
        actions = planner.advance(*step.events)
        yield replace(step, actions=tuple(actions), solves=tuple(solves))


def _event(item: Mapping[str, Any], seen: ev.WindowsSeen) -> ev.Event:
    """Restore an event; windows without content are those that were `seen` last."""
    if item["type"] == "windows_seen" and "windows" not in item:
        return replace(seen, time=item["time"])
    event = restored(item)
    assert isinstance(event, ev.Event)
    return event


class JournalLog(HoleLog):
    """The holes that the planner of a run saw: nodes in windows, or held by its blocks.

    Times are those at which the planner saw a node come or go, which is up to a poll later than it happened.

    Raises
    ------
    InvalidInput
        The planner saw no idle node.
    """

    def __init__(self, name: str, steps: Sequence[Sequence[ev.Event]]) -> None:
        self.name = name
        tracker = _Tracker()
        for events in steps:
            # A survey shows a block's nodes no longer as idle, and only then the block as started.
            for event in sorted(events, key=lambda event: isinstance(event, ev.WindowsSeen)):
                tracker.take(event)
        holes = tracker.finish(steps[-1][-1].time) if steps else []
        if not holes:
            raise InvalidInput(f"{name}: the run saw no idle nodes; there is nothing to replay")
        names = sorted({node for node, _, _ in holes})
        self.nodes = len(names)
        self.start, self.end = steps[0][0].time, steps[-1][-1].time
        index = {node: number for number, node in enumerate(names)}
        nodes, starts, ends = zip(*holes, strict=True)
        self.table = HoleTable.sorted(names, [index[node] for node in nodes], starts, ends)

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        if forecasts:
            raise refuse_forecasts(self.name)
        return self.table.changes(before=self.end)


def trainers_of(steps: Iterable[Iterable[ev.Event]], start: float) -> tuple[PlannedJob, ...]:
    """Return the training jobs of a run as they were submitted, with times in seconds after `start`."""
    trainers: dict[str, PlannedJob] = {}
    for event in chain.from_iterable(steps):
        if isinstance(event, ev.TrainerSubmitted) and event.trainer.name not in trainers:
            trainer = event.trainer
            deadline = None if trainer.deadline is None else trainer.deadline - start
            trainers[trainer.name] = replace(trainer, submitted=max(0.0, trainer.submitted - start), deadline=deadline)
    return tuple(trainers.values())


class _Tracker:
    """Follows the idle nodes through the events."""

    def __init__(self) -> None:
        self._holes: list[tuple[str, float, float]] = []
        self._since: dict[str, float] = {}
        self._held: dict[str, tuple[str, ...]] = {}
        self._gone: dict[str, float] = {}
        """Nodes whose slots or blocks have ended -> when; the next survey shows whether they are idle."""

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.WindowsSeen(windows=windows):
                self._survey(event.time, {node for window in windows for node in window.nodes})
            case ev.BlockStarted(block=block, nodes=nodes):
                self._held[block] = nodes
                for node in nodes:
                    self._since.setdefault(node, event.time)
            case ev.BlockEnded(block=block):
                for node in self._held.pop(block, ()):
                    self._gone.setdefault(node, event.time)
            case ev.NodesLeft(nodes=nodes):
                for node in nodes:
                    self._gone.setdefault(node, event.time)
            case ev.NodesJoined(nodes=joined):
                for member in joined:
                    self._gone.pop(member.name, None)

    def finish(self, end: float) -> list[tuple[str, float, float]]:
        for node in list(self._since):
            self._close(node, self._gone.get(node, end))
        return [(node, start, end) for node, start, end in self._holes if start < end]

    def _survey(self, time: float, free: set[str]) -> None:
        held = {node for nodes in self._held.values() for node in nodes}
        for node in self._since.keys() - free - held:
            self._close(node, self._gone.get(node, time))
        for node in free:
            self._since.setdefault(node, time)
        self._gone = {node: gone for node, gone in self._gone.items() if node in held}

    def _close(self, node: str, end: float) -> None:
        self._holes.append((node, self._since.pop(node), end))
