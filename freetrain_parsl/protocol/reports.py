"""What a training reports while it runs in a slot, and how its run there ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from freetrain_parsl.protocol.fields import Count, Duration, Number, Text

__all__ = [
    "GroupFailed",
    "Joined",
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


class PauseReason(str, Enum):
    """Why a run ended before its training was done; the value is the sentence for the log."""

    REQUESTED = "a pause was requested"
    CLOSING = "a node is about to close"
    LEFT = "the others go on without this process"


@dataclass(frozen=True)
class Progress:
    """How far a training is, reported by its first member.

    Parameters
    ----------
    step
        Optimizer steps done, in all fragments.
    epoch
        Number of the current epoch, from 0.
    samples
        Samples processed, in all fragments.
    samples_total
        Samples of the whole training, if its length is known.
    slot_seconds
        Time spent in the steps that count, in all fragments, times the slots that took part.
    loss
        Mean loss a sample of the current epoch so far; ``None`` before its first step.
    rate
        Recent throughput of this fragment, samples a second, without checkpoint writes; ``None`` at its start.
    samples_lost, duplicate_samples
        Samples never, or more than once, trained on in an epoch; counted over the finished epochs.
    checkpoint_step
        Step of the newest durable checkpoint; ``None`` before the first.
    resumed_from
        Step of the checkpoint that this fragment started from; ``None`` if it started afresh.
    write_seconds
        Estimated time to write a checkpoint, seconds.
    refused_checkpoints
        Paths of damaged checkpoints that were passed over when this fragment started.
    in_place
        Whether the training can change its group in place; one whose state is sharded over the members cannot.
    storage_problem
        The condition of a checkpoint directory in which nothing can be saved for now; empty while saving works.
    next_save
        Seconds until the next periodic save is due, then.
    code_note
        What the user should know about a change of the training's code; empty: nothing.
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
    write_seconds: Duration = 0.0
    refused_checkpoints: tuple[Text, ...] = ()
    in_place: bool = True
    storage_problem: Text = ""
    next_save: Duration = 0.0
    code_note: Text = ""


@dataclass(frozen=True)
class Ready:
    """A newcomer has everything but the state, and waits to be taken into the group."""


@dataclass(frozen=True)
class GroupFailed:
    """A member has left its group because a peer failed, and waits for the command to join another.

    Parameters
    ----------
    generation
        The group's number.
    reason
        The error of the collective.
    unreachable
        Pairs of ranks that do not reach each other, where the group could not form because of that.
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
        The new group's.
    paused
        Seconds without progress: from the boundary, or from the failure of a peer, to the next batch.
    transferred
        Seconds of these in which the state was transferred.
    """

    generation: Count
    paused: Duration
    transferred: Duration


Report: TypeAlias = Progress | Ready | GroupFailed | Joined
"""What a run reports before its end."""


@dataclass(frozen=True)
class RunFinished:
    """The function has returned: the training is done. The first member's value is the message's payload."""

    progress: Progress


@dataclass(frozen=True)
class RunPaused:
    """The function was stopped at a boundary; the state is saved, or others have it."""

    reason: PauseReason
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class RunFailed:
    """The function raised; the exception is the message's payload."""


@dataclass(frozen=True)
class PeersFailed:
    """Peers failed and the run cannot go on in place; what was done since the last checkpoint is lost.

    Parameters
    ----------
    generation, reason, unreachable
        As in `GroupFailed`.
    """

    generation: Count
    reason: Text
    unreachable: tuple[tuple[Count, Count], ...] = ()


@dataclass(frozen=True)
class StorageFailed:
    """The checkpoint directory cannot be used; the training is not at fault and waits.

    Parameters
    ----------
    reason
        The whole error.
    condition
        What is wrong with the directory.
    """

    reason: Text
    condition: Text


RunEnd: TypeAlias = RunFinished | RunPaused | RunFailed | PeersFailed | StorageFailed
"""How a run in a slot ends."""
