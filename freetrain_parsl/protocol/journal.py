"""The records of the journal: what the driver observed, decided and did, with one class for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freetrain_parsl.protocol.codec import by_type

__all__ = [
    "KINDS",
    "ArrayEnded",
    "ArrayMeasured",
    "ArrayStarted",
    "Assign",
    "BaseShared",
    "BatchChanged",
    "BatchRequests",
    "BlockEnded",
    "BlockReleased",
    "BlockRequested",
    "BlockStarted",
    "BlockSubmitted",
    "BlockYields",
    "Checkpoint",
    "ClockStepped",
    "CodeChanged",
    "CohortJoined",
    "CohortStalled",
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
    "PlainStart",
    "PlannerStarted",
    "PlannerStep",
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
    "TrainingNoted",
    "TrainingStalled",
    "TrainingSubmitted",
    "TrainingTriesAgain",
    "TrainingWaits",
    "TrainsAlone",
    "ValuesSampled",
    "record_of",
]


_MOST_NAMES = 4


@dataclass(frozen=True)
class Record:
    """One entry of the journal; times are in seconds since the epoch, on a clock that is never stepped.

    Parameters
    ----------
    subject
        The training job, block, slot or node concerned; empty: none of them.
    """

    subject: str


# ── the run ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ClockStepped(Record):
    """The wall clock was set forward by `seconds` (negative: back), and leads the journal's clock by `lead`."""

    seconds: float
    lead: float


@dataclass(frozen=True)
class InterchangeEnded(Record):
    """HTEX's interchange ended."""

    reason: str


@dataclass(frozen=True)
class InterchangeRestarted(Record):
    """HTEX's interchange was restarted."""


@dataclass(frozen=True)
class BatchRequests(Record):
    """How often each command of the batch system was run in the last `seconds`."""

    seconds: float
    counts: dict[str, int]


@dataclass(frozen=True)
class PlannerStarted(Record):
    """The planner with its policy's name and its settings, seconds; `slots_per_node` as for `Planner`."""

    policy: str
    settings: dict[str, Any]
    slots_per_node: int = 1


@dataclass(frozen=True)
class PlannerStep(Record):
    """The planner received `events` and returned `actions`, see `freetrain_parsl.protocol.codec`.

    Windows without content are the same as before; the progress of all trainers is one item. The decisions on the way
    precede this record.
    """

    events: list[dict[str, Any]]
    actions: list[dict[str, Any]]


@dataclass(frozen=True)
class Decision(Record):
    """The planner made a decision; `seconds`: solve time."""

    policy: str
    counts: dict[str, int]
    objective: float
    proven: bool
    seconds: float


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class BlockRequested(Record):
    """A block was requested; `seconds`: its walltime, `closes`: when its window closes.

    `node_kind`: the kind of its nodes; empty where there is one kind only.
    """

    nodes: list[str]
    seconds: float
    closes: float | None
    node_kind: str = ""


@dataclass(frozen=True)
class BlockSubmitted(Record):
    """The batch system accepted the block as `job`."""

    job: str


@dataclass(frozen=True)
class BlockStarted(Record):
    """The block is seen to have started on its nodes, `since` when; ``None``: its batch system does not say."""

    nodes: list[str]
    ends: float | None
    since: float | None = None


@dataclass(frozen=True)
class BlockYields(Record):
    """The block releases its nodes early, by `closes`."""

    nodes: list[str]
    closes: float
    reason: str


@dataclass(frozen=True)
class BlockReleased(Record):
    """The block is released, or withdrawn from the queue."""

    reason: str


@dataclass(frozen=True)
class StartsFailed(Record):
    """`count` consecutive attempts to start a block have failed; 0: a block has started again."""

    count: int
    most: int
    next_attempt: float | None
    reason: str


@dataclass(frozen=True)
class BlockEnded(Record):
    """The block has ended; `held`: until when a survey has shown that it held its nodes, ``None``: none has."""

    nodes: list[str]
    reason: str
    held: float | None = None


# ── nodes and slots ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EnvironmentDiffers(Record):
    """A node's Python, packages or network differ from the driver's; `refused`: no training job can run there."""

    difference: str
    refused: bool


@dataclass(frozen=True)
class PlainStart(Record):
    """A node was to be started from an image, and was not."""

    reason: str


@dataclass(frozen=True)
class SlotJoined(Record):
    """A slot has connected; again, with another process, after each training job in it."""

    node: str
    block: str
    pid: int


@dataclass(frozen=True)
class SlotLost(Record):
    """A slot has ended or failed; `planned`: it was to end, as its node or block does."""

    node: str
    reason: str
    planned: bool = False


@dataclass(frozen=True)
class NodeJoined(Record):
    """All slots of a node have connected, or the first where jobs share nodes; `node_kind` as in `BlockRequested`."""

    block: str
    closes: float
    node_kind: str = ""


@dataclass(frozen=True)
class NodeLeft(Record):
    """A node is no longer in the pool, with none of its slots."""

    reason: str


@dataclass(frozen=True)
class NodeSetAside(Record):
    """A training job cannot use the node, or its slot, see `reason`; it rejoins the pool after `seconds`."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class NodeClosing(Record):
    """The batch system has signalled that it is reclaiming a node."""

    closes_in: float


# ── training jobs ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TrainingSubmitted(Record):
    """A training job was submitted."""

    min_nodes: int
    max_nodes: int
    samples: int | None


@dataclass(frozen=True)
class Assign(Record):
    """The planner assigns these nodes to a waiting training job."""

    nodes: list[str]


@dataclass(frozen=True)
class Grow(Record):
    """The planner assigns more nodes to a training job; `nodes` are all of its nodes."""

    nodes: list[str]


@dataclass(frozen=True)
class Shrink(Record):
    """The planner takes nodes from a training job; `nodes` are the remaining ones."""

    nodes: list[str]


@dataclass(frozen=True)
class Stop(Record):
    """The planner takes all nodes from a training job."""

    nodes: list[str]


@dataclass(frozen=True)
class FragmentStarted(Record):
    """A group starts training.

    Parameters
    ----------
    generation
        The group's number.
    nodes
        Its nodes.
    in_place
        Its processes continue from the previous group, without a checkpoint.
    paused
        Seconds without progress before that.
    array
        The array in which it trains, fused with others; empty: by itself.
    moved
        Bytes of a state divided among the processes that went from one to another.
    repaired
        It continues after a failure, without repeating a step.
    """

    generation: int
    nodes: list[str]
    in_place: bool
    paused: float
    array: str = ""
    moved: int = 0
    repaired: bool = False


@dataclass(frozen=True)
class FragmentResumed(Record):
    """A group resumed from the checkpoint of `step`, made in steps of `slot_seconds`.

    `from_memory`: not from a checkpoint, but from copies of a sharded state in the memory of its nodes. `furthest`: the
    last step that it had reported before; those after `step` are repeated. ``None``: not known, as to a new driver.
    """

    step: int
    slot_seconds: float
    from_memory: bool = False
    furthest: int | None = None

    @property
    def source(self) -> str:
        """What it resumed from, and the steps that it repeats, in words."""
        source = f"{'copies in memory' if self.from_memory else 'the checkpoint'} of step {self.step:,}"
        first, last = self.step + 1, self.furthest or 0
        if last < first:
            return source
        return f"{source}, repeats step {last:,}" if first == last else f"{source}, repeats steps {first:,} to {last:,}"


@dataclass(frozen=True)
class FragmentEnded(Record):
    """A group ended; `failure`: because a member failed; `array` as in `FragmentStarted`.

    `slot_seconds`: of the steps that count, as last reported, over all groups; ``None``: not reported. `lost`: slots
    whose process has failed or was taken -> their nodes; empty: only their connections have failed, or not known.
    """

    generation: int
    nodes: list[str]
    failure: bool
    seconds: float = 0.0
    array: str = ""
    slot_seconds: float | None = None
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def loss(self) -> str:
        """Where processes were lost, in words."""
        nodes, number = sorted(set(self.lost.values())), len(self.lost)
        if not nodes:
            return "a process or node failed"
        more = f" and {len(nodes) - _MOST_NAMES} more" if len(nodes) > _MOST_NAMES else ""
        where = ", ".join(nodes[:_MOST_NAMES]) + more
        return f"its process on {where} was lost" if number == 1 else f"its {number} processes on {where} were lost"


@dataclass(frozen=True)
class CohortJoined(Record):
    """These training jobs of one function may run fused; the planner knows them by the cohort's name, the subject."""

    trainings: list[str]


@dataclass(frozen=True)
class CohortStalled(Record):
    """None of the cohort's training jobs runs, for `reason`; empty: an array runs again."""

    reason: str


@dataclass(frozen=True)
class ArrayStarted(Record):
    """An array of a cohort starts on a node."""

    array: str
    node: str


@dataclass(frozen=True)
class ArrayMeasured(Record):
    """An array of `members` is `gain` times as fast as its members one by one."""

    members: int
    gain: float


@dataclass(frozen=True)
class BaseShared(Record):
    """A member has `size` bytes of frozen tensors in common with all `members` of its array, in memory once.

    Parameters
    ----------
    turns
        Why the members of the array are not fused, but step in turns; empty: they are fused.
    """

    array: str
    members: int
    size: int
    turns: str = ""

    def how(self, members: int | None = None) -> str:
        """Say how the members train, and what they share; `members`: how many they are by now."""
        base = f", base shared: {self.size / 1e6:.1f} MB once for {members or self.members} members"
        return f"{'in turns' if self.turns else 'fused'}{base if self.size else ''}{self.turns and '; '}{self.turns}"


@dataclass(frozen=True)
class ArrayEnded(Record):
    """An array ended after `seconds`; `failure`: because its process failed, in `slot`."""

    array: str
    node: str
    failure: bool
    seconds: float
    slot: str = ""


@dataclass(frozen=True)
class TrainsAlone(Record):
    """A training job that could have been fused trains by itself, for `reason`."""

    reason: str


@dataclass(frozen=True)
class Checkpoint(Record):
    """The checkpoint of `step` is durable."""

    step: int


@dataclass(frozen=True)
class BatchChanged(Record):
    """The batches have `size` samples now, and had `before`; the gradient noise scale in samples, infinite: `null`."""

    size: int
    before: int
    noise_scale: float | None


@dataclass(frozen=True)
class ValuesSampled(Record):
    """Values of the training job at `step`: its loss, and what it logs; a thin sample, for its curves."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class CodeChanged(Record):
    """The training job starts over, or resumes from a checkpoint of different code."""

    note: str


@dataclass(frozen=True)
class TrainingNoted(Record):
    """Something about the training job that its user should know, such as why it does not change in place."""

    note: str


@dataclass(frozen=True)
class TrainingWaits(Record):
    """The job gets no nodes because the checkpoint directory cannot be used; the next attempt is at `until`."""

    reason: str
    until: float


@dataclass(frozen=True)
class TrainingTriesAgain(Record):
    """The checkpoint directory can be used again."""


@dataclass(frozen=True)
class SavingFails(Record):
    """The training job runs, but cannot save checkpoints."""

    reason: str


@dataclass(frozen=True)
class SavingWorks(Record):
    """The training job can save checkpoints again."""


@dataclass(frozen=True)
class TrainingStalled(Record):
    """The training job makes no progress, for `reason`; empty: it makes progress again, or has ended."""

    reason: str


@dataclass(frozen=True)
class TrainingFinished(Record):
    """The training job finished at `step`; not `trained`: its result is that of an earlier run."""

    trained: bool
    step: int


@dataclass(frozen=True)
class TrainingCancelled(Record):
    """The training job was cancelled; it ends once its state is saved."""


@dataclass(frozen=True)
class TrainingFailed(Record):
    """The training job ended with an error; not `final`: `freetrain resume` continues it."""

    error: str
    final: bool = True


KINDS: Mapping[str, type[Record]] = by_type(*Record.__subclasses__())
"""Journal kind -> record class."""


def record_of(kind: str, subject: str, detail: Mapping[str, Any]) -> Record | None:
    """Restore a record from its journal entry; ``None`` if this version does not know its kind or fields."""
    try:
        return KINDS[kind](subject, **detail)
    except (KeyError, TypeError):
        return None
