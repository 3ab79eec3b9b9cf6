"""The reports of a training job that runs in a slot, and the ways in which a run ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from freetrain_parsl.planning.sizes import ANY_COUNT, AllowedCounts
from freetrain_parsl.protocol.codec import Count, Duration, Number, Text

__all__ = [
    "BatchReport",
    "GroupFailed",
    "Joined",
    "Logged",
    "Noted",
    "PauseReason",
    "PeersFailed",
    "Progress",
    "Ready",
    "Report",
    "RunEnd",
    "RunFailed",
    "RunFinished",
    "RunPaused",
    "StorageFailed",
]


class PauseReason(Enum):
    """Why a run ended before its training job was done."""

    REQUESTED = "requested"
    CLOSING = "closing"
    LEFT = "left"

    @property
    def sentence(self) -> str:
        """The reason, for logs and manifests."""
        return _SENTENCES[self]


_SENTENCES = {
    PauseReason.REQUESTED: "a pause was requested",
    PauseReason.CLOSING: "a node is about to close",
    PauseReason.LEFT: "the other members continue without this process",
}


@dataclass(frozen=True)
class BatchReport:
    """The batch of a training job that lets the driver choose its size.

    Parameters
    ----------
    size
        Samples in a batch now.
    initial
        The user's batch size, to which the learning rate belongs.
    least, most
        Its range, inclusive.
    square, variance
        Squared norm of the true gradient, and variance of the gradient of one sample (the trace of its covariance);
        ``None`` while they are not known.
    """

    size: Count
    initial: Count
    least: Count
    most: Count
    square: Number | None = None
    variance: Number | None = None

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples, variance over square; infinite if the gradient is lost in the noise."""
        if self.square is None or self.variance is None:
            return None
        return self.variance / self.square if self.square > 0 else math.inf


@dataclass(frozen=True)
class Progress:
    """The progress of a training job, reported by the member of rank 0.

    Parameters
    ----------
    step
        Optimizer steps, over all fragments.
    epoch
        Number of the current epoch, from 0.
    samples
        Samples processed, over all fragments.
    samples_total
        Samples of the whole training job, if its length is known.
    slot_seconds
        Time spent in the steps that count times the number of slots, over all fragments.
    loss
        Mean loss per sample of the current epoch so far; ``None`` before its first step.
    rate
        Recent throughput of this fragment in samples per second, excluding checkpoint writes; ``None`` at its start.
    samples_lost, duplicate_samples
        Samples not trained on, or trained on more than once, in an epoch; counted over the finished epochs.
    checkpoint_step
        Step of the newest durable checkpoint; ``None`` if there is none.
    resumed_from
        Step of the checkpoint from which this fragment resumed; ``None`` if it started from scratch.
    from_memory
        Whether it was not a checkpoint, but copies of a sharded state in the memory of the nodes.
    write_seconds
        Estimated time to write a checkpoint, in seconds.
    refused_checkpoints
        Paths of damaged checkpoints that were skipped when this fragment started.
    in_place
        Whether the training job can change its group in place.
    allowed_counts
        Numbers of processes on which its model can run, within the bounds that its user stated.
    sharded_bytes
        Size of its state if that is divided evenly among the members; 0: each of them has all of it.
    storage_problem
        The condition of the checkpoint directory if it cannot be written; empty while saving works.
    next_save
        Seconds until the next periodic save, if saving fails.
    code_note
        Note for the user about a change of the training job's code; empty if there is none.
    structure
        Equal for training jobs that may be fused; empty if it is not a member of an array.
    not_fused
        Why a member of an array trains by itself; empty if it does not, or for no reason of its own.
    batch
        Its batch, if the driver chooses the size; otherwise ``None``.
    """

    step: Count = 0
    epoch: Count = 0
    samples: Count = 0
    samples_total: Count | None = None
    slot_seconds: Duration = 0.0
    loss: Number | None = None
    rate: Number | None = None
    samples_lost: Count = 0
    duplicate_samples: Count = 0
    checkpoint_step: Count | None = None
    resumed_from: Count | None = None
    from_memory: bool = False
    write_seconds: Duration = 0.0
    refused_checkpoints: tuple[Text, ...] = ()
    in_place: bool = True
    allowed_counts: AllowedCounts = ANY_COUNT
    sharded_bytes: Count = 0
    storage_problem: Text = ""
    next_save: Duration = 0.0
    code_note: Text = ""
    structure: Text = ""
    not_fused: Text = ""
    batch: BatchReport | None = None


@dataclass(frozen=True)
class Ready:
    """A newcomer has everything but the state and waits to join the group."""


@dataclass(frozen=True)
class GroupFailed:
    """A member has left its group because a peer failed, and waits for a command to join another.

    Parameters
    ----------
    generation
        The group's number.
    reason
        The error of the collective.
    unreachable
        Pairs of ranks that cannot reach each other, if that is why the group could not be formed.
    """

    generation: Count
    reason: Text
    unreachable: tuple[tuple[Count, Count], ...] = ()


@dataclass(frozen=True)
class Joined:
    """A member trains in its new group.

    Parameters
    ----------
    generation
        Number of the new group.
    paused
        Seconds without progress: from the boundary, or from the failure of a peer, to the next batch.
    transferred
        Seconds of `paused` that the transfer of the state took.
    received
        Bytes of a state that is divided among the members which this one got from others.
    """

    generation: Count
    paused: Duration
    transferred: Duration
    received: Count = 0


@dataclass(frozen=True)
class Noted:
    """A fact about the training job that its user should know, such as why its group cannot change in place."""

    note: Text


@dataclass(frozen=True)
class Logged:
    """Values for trackers, reported by the member of rank 0; some of them may have been reported before.

    Parameters
    ----------
    rows
        Each a JSON object: ``step``, ``epoch``, ``time`` (seconds since the epoch), and ``values`` by name.
    """

    rows: tuple[Text, ...]


Report: TypeAlias = Progress | Ready | GroupFailed | Joined | Noted | Logged
"""A report of a run before its end."""


@dataclass(frozen=True)
class RunFinished:
    """The function returned: the training job is done. The return value of rank 0 is the message's payload."""

    progress: Progress


@dataclass(frozen=True)
class RunPaused:
    """The function was stopped at a boundary; the state is saved, or other members have it."""

    reason: PauseReason
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class RunFailed:
    """The function raised an exception, which is the message's payload.

    Parameters
    ----------
    reason
        The exception, in words.
    """

    reason: Text = ""


@dataclass(frozen=True)
class PeersFailed:
    """Peers failed and the run cannot continue in place; the progress since the last checkpoint is lost.

    Parameters
    ----------
    generation, reason, unreachable
        As in `GroupFailed`.
    step
        Optimizer steps that this process has made, over all fragments.
    """

    generation: Count
    reason: Text
    unreachable: tuple[tuple[Count, Count], ...] = ()
    step: Count = 0


@dataclass(frozen=True)
class StorageFailed:
    """The checkpoint directory cannot be used; the training job is not at fault and waits.

    Parameters
    ----------
    reason
        The full error message.
    condition
        The condition of the directory.
    """

    reason: Text
    condition: Text


RunEnd: TypeAlias = RunFinished | RunPaused | RunFailed | PeersFailed | StorageFailed
"""How a run in a slot ends."""
