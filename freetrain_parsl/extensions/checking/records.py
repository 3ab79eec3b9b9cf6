"""What the processes of a check are told, and what they record. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from freetrain_parsl.protocol.reports import CountRefused

__all__ = [
    "CRASHED",
    "Frame",
    "Graph",
    "Kind",
    "Leaf",
    "Place",
    "ProcessRecord",
    "RecordedStep",
    "Scalar",
    "Value",
    "Variant",
    "distance",
]

CRASHED = "was ended by"
"""Begins the error of a process that a signal has ended."""

Place: TypeAlias = tuple[int, bool, int, int]
"""Epoch, whether its batches are done, samples of it, and steps on the current batch: see `Cursor.place`."""


@dataclass(frozen=True)
class Variant:
    """How one process of a check runs."""

    rank: int = 0  # in the first group
    size: int = 1
    pause_at: int | None = None  # steps after which it is paused with a checkpoint
    grow_at: int | None = None  # steps after which a second process joins it
    joins: bool = False  # whether it is the one that joins
    fail_at: int | None = None
    """Steps after which the last process fails in the middle of a batch, which the others repeat."""
    fused: bool = False  # whether two members of one array run the function, in one process
    leave_at: int | None = None  # steps after which it is over; ``None``: at the end of the function
    double: bool = True  # whether numbers are float64
    steady: bool = False
    """Whether random numbers in the loop are constants and BatchNorm uses its running statistics, so that nothing
    depends by design on how a batch is divided."""
    scalars: bool = False  # whether the scalars on the way to each loss are recorded
    whole: bool = False  # whether epochs and the loop over them keep their length


@dataclass(frozen=True)
class Leaf:
    """The digest of a number, string or tensor."""

    bits: bytes  # equal for equal bits, shape and type
    text: str = ""  # the value, shortened
    norm: float | None = None  # its Euclidean norm; ``None`` if it can be compared by its bits only
    sketch: tuple[float, ...] = ()
    """Its projections on random signs, from which the norm of a difference is estimated; a short one is exact."""
    of: str = ""  # name of its type or of that of the object that contains it

    def differs(self, other: Leaf, tolerance: float = 0.0, scale: float = 0.0) -> bool:
        """Return whether two values differ: by more than `tolerance`, relative to the larger norm or to `scale`."""
        if self.bits == other.bits:
            return False
        if tolerance == 0.0 or self.norm is None or other.norm is None or len(self.sketch) != len(other.sketch):
            return tolerance == 0.0 or (self.norm is None) != (other.norm is None) or self.norm is None
        return not distance(self, other) <= tolerance * max(self.norm, other.norm, scale)


def distance(one: Leaf, other: Leaf) -> float:
    """Estimate the norm of the difference of two tensors; infinite if it is no number."""
    squares = sum((a - b) ** 2 for a, b in zip(one.sketch, other.sketch, strict=True))
    norm = math.sqrt(squares / max(1, len(one.sketch)))
    return math.inf if math.isnan(norm) else norm


class Kind(Enum):
    """What a part of the session's state is; a difference of an earlier one is more probably the cause of others."""

    RATE = "hyperparameter"
    OTHER = "state"  # of schedulers, and of what the user keeps
    OUTSIDE = "parameter of an optimizer only"
    BUFFER = "buffer"
    PARAMETER = "parameter"
    MOMENT = "state of an optimizer"
    STATISTICS = "running statistics"  # of BatchNorm, which differ between processes by design
    OWN = "what each process has for itself"  # positions in streams, and what FreeTrain's integrations note


@dataclass(frozen=True)
class Value:
    """A part of the session's state: its digest, and what it is."""

    leaf: Leaf
    kind: Kind
    family: str = ""
    """Parts whose differences are judged by the largest of their norms: rounding decides the direction of a zero."""


@dataclass(frozen=True)
class Frame:
    """A function of the user that was running: its qualified name, file and first line."""

    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Scalar:
    """A number on the way to the loss: the line and the function that computed it, and its value."""

    where: str
    function: str
    value: float


@dataclass(frozen=True)
class Graph:
    """What the graph of a loss shows."""

    sums: bool = False  # whether one of torch's losses is a sum over samples
    weighted: bool = False  # whether one is a mean over the weights of classes
    casts: bool = False  # whether numbers are converted to a type of lower precision
    checkpoint: bool = False  # whether it contains reentrant activation checkpointing


@dataclass
class RecordedStep:
    """One loss of one process."""

    place: Place  # where in the data
    line: str  # ``file:line`` of the user's call
    loss: float  # of its piece
    weight: float  # share of the batch that the piece has
    draws: bool  # whether random numbers were drawn since the batch was handed out
    graph: Graph = Graph()  # of the loss
    scalars: tuple[Scalar, ...] = ()  # on the way to the loss, in order
    gradients: dict[str, Leaf] = field(default_factory=dict)
    """Of the whole batch: parameter -> digest; empty before the last piece."""
    made: bool = False  # whether the optimizer step was made


@dataclass
class ProcessRecord:
    """What one process of a check has recorded."""

    variant: Variant = Variant()
    states: dict[Place, dict[str, Value]] = field(default_factory=dict)
    """At each boundary: name -> part of the session's state."""
    held: dict[Place, dict[str, Leaf]] = field(default_factory=dict)
    """At each boundary: path -> what the user's frames, and the globals that they use, hold."""
    steps: list[RecordedStep] = field(default_factory=list)  # in order
    events: list[tuple[str, str]] = field(default_factory=list)
    """(kind, where or what), such as a buffer that was assigned anew."""
    frames: list[Frame] = field(default_factory=list)
    """The user's functions that were running at the last boundary, from the innermost."""
    sharded: bool = False  # whether a model is sharded over the processes
    batch_norm: list[str] = field(default_factory=list)  # names of normalizations over the batch
    returned: dict[str, Leaf] = field(default_factory=dict)
    """What the function returned."""
    metrics: dict[str, Leaf] = field(default_factory=dict)  # of the session, at the end
    lost: int = 0  # samples, by the session's audit
    seen: int = 0
    error: str = ""  # how the function failed: type and message
    refused: bool = False  # whether FreeTrain raised it
    count: CountRefused | None = None  # the number of processes, if it is the cause
    trace: str = ""  # the user's line
    hangs: bool = False  # whether it was ended because it did not end
    notes: list[str] = field(default_factory=list)  # what could not be checked, and why
    seconds: float = 0.0  # duration

    @property
    def made(self) -> list[RecordedStep]:
        """The optimizer steps."""
        return [step for step in self.steps if step.made]

    def failed(self, error: str, trace: str, *, refused: bool = False) -> None:
        """Note how the function failed."""
        self.error, self.trace, self.refused = error, trace, refused
