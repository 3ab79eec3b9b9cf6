"""The records of the journal: what the driver saw, decided and did, one class for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetrain_parsl.protocol.codec import by_type

__all__ = [
    "KINDS",
    "Assign",
    "BlockEnded",
    "BlockReleased",
    "BlockRequested",
    "BlockStarted",
    "BlockSubmitted",
    "BlockYields",
    "Checkpoint",
    "ClockStepped",
    "CodeChanged",
    "Decision",
    "EnvironmentDiffers",
    "FragmentEnded",
    "FragmentResumed",
    "FragmentStarted",
    "Grow",
    "InterchangeEnded",
    "InterchangeRestarted",
    "NodeClosing",
    "NodeJoined",
    "NodeLeft",
    "NodeSetAside",
    "Record",
    "SavingFails",
    "SavingWorks",
    "Shrink",
    "SlotJoined",
    "SlotLost",
    "StartsFailed",
    "Stop",
    "TrainingCancelled",
    "TrainingFailed",
    "TrainingFinished",
    "TrainingStalled",
    "TrainingSubmitted",
    "TrainingTriesAgain",
    "TrainingWaits",
    "Windows",
    "record_of",
]


@dataclass(frozen=True)
class Record:
    """Something that happened; times in seconds since the epoch, on a clock that is never stepped.

    Parameters
    ----------
    subject
        The training, block, slot or node that it is about; empty: none of them.
    """

    subject: str


# ── the run ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ClockStepped(Record):
    """The wall clock was set forward by `seconds` (negative: back), and is ahead of the record's time by `lead`."""

    seconds: float
    lead: float


@dataclass(frozen=True)
class InterchangeEnded(Record):
    """HTEX's interchange ended."""

    reason: str


@dataclass(frozen=True)
class InterchangeRestarted(Record):
    """HTEX's interchange was started again."""


@dataclass(frozen=True)
class Windows(Record):
    """The windows have changed; for each its `nodes` and when it `closes`."""

    windows: list[dict[str, Any]]


@dataclass(frozen=True)
class Decision(Record):
    """The planner made a decision; `seconds`: the solve's."""

    policy: str
    counts: dict[str, int]
    objective: float
    proven: bool
    seconds: float


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class BlockRequested(Record):
    """A block was requested; `seconds`: its walltime, `closes`: its window."""

    nodes: list[str]
    seconds: float
    closes: float | None


@dataclass(frozen=True)
class BlockSubmitted(Record):
    """The batch system has accepted it as `job`."""

    job: str


@dataclass(frozen=True)
class BlockStarted(Record):
    """It has its nodes."""

    nodes: list[str]
    ends: float | None


@dataclass(frozen=True)
class BlockYields(Record):
    """It leaves its nodes before it would lose them, by `closes`."""

    nodes: list[str]
    closes: float
    reason: str


@dataclass(frozen=True)
class BlockReleased(Record):
    """It is given back, or withdrawn from the queue."""

    reason: str


@dataclass(frozen=True)
class StartsFailed(Record):
    """So many attempts in a row to start a block have failed; 0: blocks start again."""

    count: int
    most: int
    next_attempt: float | None
    reason: str


@dataclass(frozen=True)
class BlockEnded(Record):
    """It is over."""

    nodes: list[str]
    reason: str


# ── nodes and slots ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EnvironmentDiffers(Record):
    """A node's Python, packages or network differ; `refused`: no training can run there."""

    difference: str
    refused: bool


@dataclass(frozen=True)
class SlotJoined(Record):
    """A slot has connected."""

    node: str
    block: str
    pid: int


@dataclass(frozen=True)
class SlotLost(Record):
    """A slot is gone."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeJoined(Record):
    """All slots of a node have connected."""

    block: str
    closes: float


@dataclass(frozen=True)
class NodeLeft(Record):
    """A node is not in the pool any more."""

    reason: str


@dataclass(frozen=True)
class NodeSetAside(Record):
    """The other nodes of a training do not reach it; it joins again after `seconds`."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class NodeClosing(Record):
    """The batch system has signalled that it takes a node."""

    closes_in: float


# ── trainings ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TrainingSubmitted(Record):
    """A training was submitted."""

    min_nodes: int
    max_nodes: int
    samples: int | None


@dataclass(frozen=True)
class Assign(Record):
    """The planner gives a waiting training these nodes."""

    nodes: list[str]


@dataclass(frozen=True)
class Grow(Record):
    """The planner gives a training further nodes; `nodes` are all."""

    nodes: list[str]


@dataclass(frozen=True)
class Shrink(Record):
    """The planner takes nodes from a training; `nodes` are those that stay."""

    nodes: list[str]


@dataclass(frozen=True)
class Stop(Record):
    """The planner takes all nodes from a training."""

    nodes: list[str]


@dataclass(frozen=True)
class FragmentStarted(Record):
    """A group begins to train.

    Parameters
    ----------
    generation
        The group's number.
    nodes
        Where it runs.
    in_place
        Its processes go on in another group, without a checkpoint.
    paused
        Seconds without progress before that.
    """

    generation: int
    nodes: list[str]
    in_place: bool
    paused: float


@dataclass(frozen=True)
class FragmentResumed(Record):
    """A group went on from the checkpoint of that step."""

    step: int


@dataclass(frozen=True)
class FragmentEnded(Record):
    """A group ended; `failure`: because of a failed member."""

    generation: int
    nodes: list[str]
    failure: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint(Record):
    """A checkpoint of that step is durable."""

    step: int


@dataclass(frozen=True)
class CodeChanged(Record):
    """It begins anew, or goes on from a checkpoint of other code."""

    note: str


@dataclass(frozen=True)
class TrainingWaits(Record):
    """It gets no nodes: the checkpoint directory cannot be used; it is tried again at `until`."""

    reason: str
    until: float


@dataclass(frozen=True)
class TrainingTriesAgain(Record):
    """The checkpoint directory can be used again."""


@dataclass(frozen=True)
class SavingFails(Record):
    """It trains, but cannot save."""

    reason: str


@dataclass(frozen=True)
class SavingWorks(Record):
    """It saves again."""


@dataclass(frozen=True)
class TrainingStalled(Record):
    """It has made no progress for about a minute, for this reason; empty: it makes progress again."""

    reason: str


@dataclass(frozen=True)
class TrainingFinished(Record):
    """It is done, at that step; not `trained`: its result is that of an earlier run."""

    trained: bool
    step: int


@dataclass(frozen=True)
class TrainingCancelled(Record):
    """It was cancelled, and ends once its state is saved."""


@dataclass(frozen=True)
class TrainingFailed(Record):
    """It ended with an error."""

    error: str


KINDS: Mapping[str, type[Record]] = by_type(*Record.__subclasses__())
"""Kind in the journal -> class."""


def record_of(kind: str, subject: str, detail: Mapping[str, Any]) -> Record | None:
    """Return a record as it was written; ``None`` if this version does not know it."""
    try:
        return KINDS[kind](subject, **detail)
    except (KeyError, TypeError):
        return None
