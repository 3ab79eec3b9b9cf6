"""The records of the journal in words, for people: failures and repairs, and why the planner decided."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from freetrain_parsl.places import count_places
from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["IncidentLevel", "actions_in_words", "cause_in_words", "incident_of"]

_LONGEST = 400
_MOST_NAMES = 4


class IncidentLevel(IntEnum):
    """What an incident means."""

    REPAIR = 0
    """Something works again."""
    FAILURE = 1
    """Something failed or does not work, and the run deals with it."""
    ERROR = 2
    """A training job has ended with an error."""
    NOTICE = 3
    """Nothing failed: a wait, a node that is given back as planned, or another fact to be known."""


_WAITS = "waits for "
"""How the reason begins for which a job makes no progress, if it waits for nodes or for a place in an array."""


def incident_of(entry: record.Record) -> tuple[IncidentLevel, str] | None:  # noqa: C901 - a table by class
    """Return a failure, repair or notice in words; ``None`` if the record is none."""
    match entry:
        case record.FragmentEnded(failure=True):
            return IncidentLevel.FAILURE, f"{entry.loss}; the group of {count_places(entry.nodes)} ended"
        case record.FragmentResumed():
            return IncidentLevel.REPAIR, f"resumed from {entry.source}"
        case record.FragmentStarted(repaired=True):
            return IncidentLevel.REPAIR, "the others continue in place; no step is repeated"
        case record.TrainingFailed(final=False):
            return IncidentLevel.FAILURE, f"interrupted: {_first_line(entry.error)}; freetrain resume continues it"
        case record.TrainingFailed():
            return IncidentLevel.ERROR, f"failed: {_first_line(entry.error)}"
        case record.TrainingStalled(reason=reason) | record.CohortStalled(reason=reason):
            if not reason:
                return IncidentLevel.REPAIR, "makes progress again"
            if reason.startswith(_WAITS):
                return IncidentLevel.NOTICE, reason
            return IncidentLevel.FAILURE, f"makes no progress: {reason}"
        case record.TrainingWaits():
            return IncidentLevel.FAILURE, f"waits: {entry.reason}"
        case record.TrainingTriesAgain():
            return IncidentLevel.REPAIR, "the checkpoint directory can be used again"
        case record.SavingFails():
            return IncidentLevel.FAILURE, f"cannot save: {entry.reason}"
        case record.SavingWorks():
            return IncidentLevel.REPAIR, "checkpoints are saved again"
        case record.CodeChanged() | record.TrainingNoted():
            return IncidentLevel.NOTICE, entry.note
        case record.ArrayEnded(failure=True):
            return IncidentLevel.FAILURE, f"the process of {entry.array} on {entry.node} failed"
        case record.TrainsAlone():
            return IncidentLevel.NOTICE, f"not fused: {entry.reason}"
        case record.BaseShared() if entry.turns:
            return IncidentLevel.NOTICE, f"in {entry.array}, {entry.how()}"
        case record.SlotLost(planned=False):
            return IncidentLevel.FAILURE, f"slot on {entry.node} lost: {entry.reason}"
        case record.NodeSetAside():
            return IncidentLevel.FAILURE, f"set aside for {entry.seconds:.0f} s: {entry.reason}"
        case record.EnvironmentDiffers():
            if entry.refused:
                return IncidentLevel.FAILURE, f"{entry.difference}; no training job can run there"
            return IncidentLevel.NOTICE, entry.difference
        case record.PlainStart():
            return IncidentLevel.NOTICE, f"reads its Python from the shared file system: {entry.reason}"
        case record.NodeClosing():
            return IncidentLevel.NOTICE, f"the batch system reclaims it in {entry.closes_in:.0f} s"
        case record.BlockYields():
            return IncidentLevel.NOTICE, f"leaves {_count(len(entry.nodes), 'node')} early: {entry.reason}"
        case record.StartsFailed(count=0):
            return IncidentLevel.REPAIR, "blocks start again"
        case record.StartsFailed():
            last = "; nothing is submitted any more" if entry.next_attempt is None else ""
            return (
                IncidentLevel.FAILURE,
                f"{entry.count} of at most {entry.most} attempts to start a block failed: {entry.reason}{last}",
            )
        case record.InterchangeEnded():
            return IncidentLevel.FAILURE, f"HTEX's interchange ended: {entry.reason}"
        case record.InterchangeRestarted():
            return IncidentLevel.REPAIR, "HTEX's interchange was restarted"
        case record.ClockStepped():
            way = "forward" if entry.seconds > 0 else "back"
            return IncidentLevel.NOTICE, f"the wall clock was set {way} by {abs(entry.seconds):.1f} s"
    return None


def cause_in_words(events: Iterable[Mapping[str, Any]]) -> str:
    """Say what the planner was given when it decided: the events of a `PlannerStep`."""
    names: dict[str, list[str]] = {}
    nodes: dict[str, list[str]] = {}
    other: list[str] = []
    for event in events:
        kind = event["type"]
        if kind in _TRAINER_EVENTS:
            trainer = event["trainer"]
            names.setdefault(kind, []).append(trainer if isinstance(trainer, str) else trainer["name"])
        elif kind in _NODE_EVENTS:
            named = (node if isinstance(node, str) else node["name"] for node in event.get("nodes", ()))
            nodes.setdefault(kind, []).extend(named)
        elif kind == "windows_seen" and "windows" in event:
            idle = sum(len(window["nodes"]) for window in event["windows"])
            other.append(f"{_count(idle, 'idle node')} seen")
        elif kind in _OTHER_EVENTS:
            other.append(_OTHER_EVENTS[kind])
    parts = [f"{_some(found)} {_TRAINER_EVENTS[kind]}" for kind, found in names.items()]
    parts += [f"{count_places(units)} {_NODE_EVENTS[kind]}" for kind, units in nodes.items()]
    return "; ".join(dict.fromkeys(parts + other)) or "regular check"


_TRAINER_EVENTS = {
    "trainer_submitted": "submitted",
    "trainer_finished": "finished",
    "trainer_failed": "failed",
    "trainer_withheld": "cannot run for now",
    "trainer_learned": "measured",
}
_NODE_EVENTS = {
    "nodes_joined": "joined",
    "nodes_left": "left",
    "nodes_closing": "about to close",
    "block_started": "started in a block",
}
_OTHER_EVENTS = {
    "block_ended": "a block ended",
    "nodes_forecast": "new forecast of closing times",
    "tasks_waiting": "ordinary tasks wait",
}


def actions_in_words(actions: Iterable[Mapping[str, Any]]) -> str:
    """Say what the planner decided: the actions of a `PlannerStep`."""
    parts = []
    for action in actions:
        match action["type"]:
            case "assign" | "grow" | "shrink" as verb:
                parts.append(f"{action['trainer']}: {verb} to {count_places(action['nodes'])}")
            case "stop":
                parts.append(f"{action['trainer']}: stop")
            case "request_block":
                nodes = _count(len(action["nodes"]), "node")
                parts.append(f"request block {action['block']}: {nodes} for {action['seconds']:.0f} s")
            case "release_block":
                parts.append(f"release block {action['block']}")
            case "lend":
                parts.append(f"{count_places(action['nodes'])} for ordinary tasks")
    return "; ".join(parts)[:_LONGEST]


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:_MOST_NAMES])
    return f"{shown} and {len(unique) - _MOST_NAMES} more" if len(unique) > _MOST_NAMES else shown


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:_LONGEST]
