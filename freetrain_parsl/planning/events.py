"""The planner's inputs (events) and outputs (actions). All times are seconds on the driver's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.model import BlockTerms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.planning.model import PlannedJob, PoolNode, Window

__all__ = [
    "Action",
    "Assign",
    "BlockEnded",
    "BlockStarted",
    "Event",
    "Grow",
    "Lend",
    "NodesClosing",
    "NodesForecast",
    "NodesJoined",
    "NodesLeft",
    "QueueBlock",
    "Reassign",
    "ReleaseBlock",
    "RequestBlock",
    "Shrink",
    "Stop",
    "TasksWaiting",
    "Tick",
    "TrainerFailed",
    "TrainerFinished",
    "TrainerHolds",
    "TrainerLearned",
    "TrainerProgressed",
    "TrainerSubmitted",
    "TrainerWithheld",
    "WindowsOutdated",
    "WindowsSeen",
]


@dataclass(frozen=True)
class Event:
    """Something that happened at `time`, a finite number.

    Raises
    ------
    PlanningError
        `time` is not a finite number.
    """

    time: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.time):
            raise PlanningError(f"an event needs a finite time, got {self.time}")


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True)
class WindowsSeen(Event):
    """The batch system was queried; `windows` and the terms replace the previous ones.

    `terms_by_kind` has the terms of the kinds of nodes for which they differ from `terms`.
    """

    windows: tuple[Window, ...]
    terms: BlockTerms = field(default_factory=BlockTerms)
    terms_by_kind: Mapping[str, BlockTerms] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class WindowsOutdated(Event):
    """The batch system has not been queried for a while: nodes that were idle then may be in use now."""


@dataclass(frozen=True)
class BlockStarted(Event):
    """A requested block holds nodes now; its slots are still starting. `ends` is the end of its walltime."""

    block: str
    nodes: tuple[str, ...]
    ends: float | None


@dataclass(frozen=True)
class BlockEnded(Event):
    """A block no longer holds nodes, or was `refused`; its nodes that had joined leave with it."""

    block: str
    refused: bool = False


@dataclass(frozen=True)
class NodesJoined(Event):
    """All slots of these nodes are ready."""

    block: str
    nodes: tuple[PoolNode, ...]


@dataclass(frozen=True)
class NodesLeft(Event):
    """The slots of these nodes are gone."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class NodesClosing(Event):
    """These nodes will be taken at `closes`, which was not known before (a notice of preemption)."""

    nodes: tuple[str, ...]
    closes: float


@dataclass(frozen=True)
class NodesForecast(Event):
    """Times at which the batch system now plans to take these nodes; ``None`` for no plan.

    According to the plan, nodes that are `due` should have been taken already and may be taken at any moment. Unlike
    `PoolNode.closes`, which is certain, this is a forecast of which nodes are likely to close soon.
    """

    closes: Mapping[str, float | None]
    due: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainerSubmitted(Event):
    """A training job requests nodes."""

    trainer: PlannedJob


@dataclass(frozen=True)
class TrainerProgressed(Event):
    """A training job has `work_left` samples left."""

    trainer: str
    work_left: float


@dataclass(frozen=True)
class TrainerLearned(Event):
    """More is known about a live training job: `trainer` replaces its previous description."""

    trainer: PlannedJob


@dataclass(frozen=True)
class TrainerFinished(Event):
    """A training job is complete."""

    trainer: str


@dataclass(frozen=True)
class TrainerFailed(Event):
    """A training job ended with its own error and must not run again."""

    trainer: str


@dataclass(frozen=True)
class TrainerWithheld(Event):
    """A training job cannot run for now, on any node; it is submitted again when it can."""

    trainer: str


@dataclass(frozen=True)
class TrainerHolds(Event):
    """A training job has lost some of its processes, and continues on these nodes only; the others are free again."""

    trainer: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class TasksWaiting(Event):
    """Ordinary one-slot tasks: those on `busy` nodes are running, and `nodes_wanted` more nodes could be used."""

    nodes_wanted: int
    busy: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Action:
    """Something the driver should do."""


@dataclass(frozen=True)
class RequestBlock(Action):
    """Submit a block on these nodes of a window, for at most `seconds`.

    It may run on other nodes of the same partition, but those to be `avoided`, unless it is `pinned`, because some of
    them close too early.
    """

    block: str
    nodes: tuple[str, ...]
    seconds: float
    window: Window
    pinned: bool
    avoided: frozenset[str] = frozenset()


@dataclass(frozen=True)
class QueueBlock(Action):
    """Submit a block of one node that waits in the queue until any node becomes idle, and then lasts `seconds`.

    It must not start on nodes that are to be `avoided`.
    """

    block: str
    seconds: float
    node_kind: str
    avoided: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReleaseBlock(Action):
    """Cancel a block that is not needed."""

    block: str


@dataclass(frozen=True)
class Reassign(Action):
    """Run a trainer on exactly these nodes from now on."""

    trainer: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class Assign(Reassign):
    """The trainer had no nodes."""


@dataclass(frozen=True)
class Grow(Reassign):
    """The trainer keeps its nodes and gets more."""


@dataclass(frozen=True)
class Shrink(Reassign):
    """The trainer keeps some of its nodes, or exchanges some for others."""


@dataclass(frozen=True)
class Stop(Reassign):
    """The trainer is left without nodes; `nodes` is empty."""


@dataclass(frozen=True)
class Lend(Action):
    """Run ordinary tasks on exactly these nodes."""

    nodes: frozenset[str]


Actions = list[Action]
