"""Every error that FreeTrain raises on purpose.

::

    FreeTrainError
    ├── UsageError              the caller's input is wrong; nothing was started or written
    │   ├── InvalidTrainer      a training app's own description (nodes, curve, work, …)
    │   ├── InvalidSettings     an executor, planner or cluster setting
    │   ├── InvalidInput        a file that was given: a curve, a job log, a campaign
    │   └── CommandNotFound     a command of the batch system is not on PATH
    ├── PlanningError           a policy broke its contract
    ├── CheckpointError
    │   ├── DamagedCheckpoint   a checkpoint's bytes are not what was written
    │   ├── CheckpointMismatch  it is intact, but of another model, optimizer or dataset
    │   ├── CodeChanged         it is intact, but was written by other code
    │   ├── ForeignCheckpoint   another user owns it, or could have changed it
    │   └── StorageUnavailable  its directory is full, over quota, gone, failing  (retry helps)
    ├── TrainingError           a training ended for a reason that is not the user's own exception
    │   ├── TrainingInterrupted the run ended before the training, by no fault of its own (resuming helps)
    │   ├── TrainingCancelled   it was cancelled; its checkpoint is kept
    │   ├── PeerFailed            another member of the process group is gone           (retry helps)
    │   ├── NonFiniteLoss       the loss is not a number any more
    │   └── TooManyRestarts     members keep crashing without reaching a further step
    └── BatchSystemError        the batch system refused or did not answer            (retry may help)
        ├── UnreadableAnswer    it answered, but with something that cannot be read   (retry may help)
        └── ClusterGone         the embedded cluster is not running

``transient`` says whether doing the same again can help. Messages are one line: what, where, how to mend it.
"""

from __future__ import annotations

import difflib
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BatchSystemError",
    "CheckpointError",
    "CheckpointMismatch",
    "ClusterGone",
    "CodeChanged",
    "CommandNotFound",
    "DamagedCheckpoint",
    "ForeignCheckpoint",
    "FreeTrainError",
    "InvalidInput",
    "InvalidSettings",
    "InvalidTrainer",
    "NonFiniteLoss",
    "PeerFailed",
    "PlanningError",
    "StorageUnavailable",
    "TooManyRestarts",
    "TrainingCancelled",
    "TrainingError",
    "TrainingInterrupted",
    "UnreadableAnswer",
    "UsageError",
]


class FreeTrainError(Exception):
    """Root of the tree: ``except FreeTrainError`` catches what this package raises on purpose."""

    transient: ClassVar[bool] = False


class UsageError(FreeTrainError, ValueError):
    """The caller's input is wrong; nothing was started, submitted or overwritten."""


class InvalidTrainer(UsageError):
    """A training app describes itself in a way that cannot be run."""


class InvalidSettings(UsageError):
    """A setting of the executor, the planner or the embedded cluster is out of range."""


class InvalidInput(UsageError):
    """A file that was given cannot be used; the message names the file and the line."""


class CommandNotFound(UsageError):
    """A command of the batch system is not on PATH; the message says where to run instead."""


class PlanningError(FreeTrainError):
    """A policy returned an allocation that breaks its contract."""


class CheckpointError(FreeTrainError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's bytes are not those that were written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact but belongs to another model, optimizer or dataset."""


class CodeChanged(CheckpointError):
    """A checkpoint is intact, but the training's code has changed since it was written."""


class ForeignCheckpoint(CheckpointError):
    """A checkpoint or its directory belongs to another user, or another user could have changed it."""


class StorageUnavailable(CheckpointError):
    """The checkpoint directory cannot be used for now: full, over quota, read-only, not mounted, failing.

    Parameters
    ----------
    message
        What could not be done.
    condition
        The condition of the directory alone; the message if it is not known.
    """

    transient = True

    def __init__(self, message: str, condition: str = "") -> None:
        super().__init__(message)
        self.condition = condition or message


class TrainingError(FreeTrainError):
    """A training ended for a reason that is not an exception of the user's own function."""


class TrainingInterrupted(TrainingError):
    """The run ended before the training did: its driver failed, lost its worker pools, or was shut down.

    The training itself did nothing wrong. Run again, it goes on from its newest checkpoint.
    """

    transient = True


class TrainingCancelled(TrainingError, CancelledError):
    """A training was cancelled by `FreeTrainExecutor.cancel`; run again, it goes on from its newest checkpoint."""


class PeerFailed(TrainingError):
    """Another member of the process group is gone, and the survivors cannot go on in place.

    Parameters
    ----------
    message
        What happened.
    unreachable
        Pairs of ranks that do not reach each other over the network, where that is the reason.
    """

    transient = True

    def __init__(self, message: str = "", unreachable: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class NonFiniteLoss(TrainingError):
    """The loss of a training is infinite or not a number: it cannot come to anything."""


class TooManyRestarts(TrainingError):
    """A training's processes keep crashing without reaching a further step, though nobody took their nodes."""


class BatchSystemError(FreeTrainError):
    """The batch system refused a request or did not answer in time."""

    transient = True


class UnreadableAnswer(BatchSystemError, ValueError):
    """The batch system answered with something that cannot be read."""


class ClusterGone(BatchSystemError):
    """The embedded cluster is not running (any more)."""

    transient = False


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Make the end of a message that refuses a word: the nearest of the known ones, or nothing."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
