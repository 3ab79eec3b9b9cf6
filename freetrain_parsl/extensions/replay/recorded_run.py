"""A live run as its planner saw it, from the journal: what happened, what it decided, and the same decisions again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.settings import SettingsInSeconds
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import restored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from freetrain_parsl.planning.model import Decision
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["RecordedRun", "Solve", "Step", "decide_again", "read_run"]


@dataclass(frozen=True)
class Solve:
    """A decision of the policy, as the journal has it; `purpose`: ``assign`` or ``demand``."""

    purpose: str
    counts: Mapping[str, int]
    objective: float
    proven: bool


@dataclass(frozen=True)
class Step:
    """A step of the planner.

    Parameters
    ----------
    time
        Seconds since the epoch.
    events, actions
        What the planner was given, and what it returned.
    solves
        The policy's decisions on the way.
    """

    time: float
    events: tuple[ev.Event, ...]
    actions: tuple[ev.Action, ...]
    solves: tuple[Solve, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded.

    Parameters
    ----------
    policy
        Name of its policy.
    settings
        The planner's.
    steps
        In order of time.
    """

    policy: str
    settings: SettingsInSeconds
    steps: tuple[Step, ...]


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
                    event = _event(item, seen)
                    if isinstance(event, ev.WindowsSeen):
                        seen = event
                    received.append(event)
                steps.append(Step(entry.time, tuple(received), tuple(map(restored, actions)), tuple(solves)))
                solves.clear()
    if started is None:
        raise InvalidInput(f"{journal}: it has no steps of a planner; give the journal of a run of this version")
    return RecordedRun(started.policy, SettingsInSeconds(**started.settings), tuple(steps))


def decide_again(run: RecordedRun, policy: Policy) -> Iterator[Step]:
    """Give a new planner the events of a run, step by step; yield the steps with its actions and decisions.

    With the policy of the run, they equal the recorded ones, provided that each solve ended before its time limit.
    """
    solves: list[Solve] = []

    def solved(_time: float, purpose: str, decision: Decision) -> None:
        solves.append(Solve(purpose, decision.counts, decision.objective, decision.proven_optimal))

    planner = Planner(policy, run.settings, solved)
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
