"""The exceptions that FreeTrain raises.

::

    FreeTrainError
    ├── UsageError              the caller's input is wrong; nothing was started or written
    │   ├── InvalidApp      the description of a training app (nodes, curve, work, …)
    │   ├── InvalidSettings     an executor, planner or cluster setting
    │   ├── InvalidInput        an input file: a curve, a job log, a campaign
    │   ├── GlobusRefused       no login, no consent, or a path that a collection does not share
    │   └── CommandNotFound     a command of the batch system is not on PATH
    ├── PlanningError           a policy violated its contract
    ├── CannotFuse              models cannot be trained as one array                 (they train one by one)
    ├── CheckpointError
    │   ├── DamagedCheckpoint   a checkpoint is corrupted
    │   ├── CheckpointMismatch  it is intact, but for another model, optimizer or dataset
    │   ├── CodeChanged         it is intact, but was written by different code
    │   ├── ForeignCheckpoint   another user owns it, or could have changed it
    │   ├── StorageUnavailable  its directory is full, over quota, missing or failing  (retry helps)
    │   └── CollectionUnavailable  Globus, or one of its collections, does not answer    (retry helps)
    ├── TrainingError           a training job ended for a reason that is not the user's own exception
    │   ├── TrainingInterrupted the run ended before the training job, for an external reason (resuming helps)
    │   ├── TrainingCancelled   it was cancelled; its checkpoint is kept
    │   ├── PeerFailed          another member of the process group has failed          (retry helps)
    │   │   ├── OutOfSync       … and the others are at different calls in the loop     (retry helps)
    │   │   └── StateLost       … which alone held its part of a sharded state          (retry helps)
    │   ├── NonFiniteLoss       the loss is NaN or infinite
    │   ├── ReplicasDiffer      the processes no longer have the same parameters, buffers or hyperparameters
    │   └── TooManyRestarts     members keep crashing without reaching a new step
    ├── DriverSuperseded        another driver has taken over the run
    ├── RemoteError             Globus Compute or an endpoint failed or did not answer (retry may help)
    └── BatchSystemError        the batch system refused or did not answer            (retry may help)
        ├── UnreadableAnswer    its output cannot be parsed                           (retry may help)
        └── ClusterGone         the embedded cluster is not running

``transient`` indicates whether a retry can help, ``resumable`` whether ``freetrain resume`` continues a training job
that ended with the error. Each message is one line: what failed, where, and the remedy.
"""

from __future__ import annotations

import difflib
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BatchSystemError",
    "CannotFuse",
    "CheckpointError",
    "CheckpointMismatch",
    "ClusterGone",
    "CodeChanged",
    "CollectionUnavailable",
    "CommandNotFound",
    "DamagedCheckpoint",
    "DriverSuperseded",
    "ForeignCheckpoint",
    "FreeTrainError",
    "GlobusRefused",
    "InvalidApp",
    "InvalidInput",
    "InvalidSettings",
    "NonFiniteLoss",
    "OutOfSync",
    "PeerFailed",
    "PlanningError",
    "RemoteError",
    "ReplicasDiffer",
    "StateLost",
    "StorageUnavailable",
    "TooManyRestarts",
    "TrainingCancelled",
    "TrainingError",
    "TrainingInterrupted",
    "UnreadableAnswer",
    "UsageError",
]


class FreeTrainError(Exception):
    """Base class of all exceptions that this package raises."""

    transient: ClassVar[bool] = False
    resumable: ClassVar[bool] = False


class UsageError(FreeTrainError, ValueError):
    """The caller's input is wrong; nothing was started, submitted or overwritten."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that a notebook shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class InvalidApp(UsageError):
    """The description of a training app is invalid: it could never run."""


class InvalidSettings(UsageError):
    """A setting of the executor, the planner or the embedded cluster is out of range."""


class InvalidInput(UsageError):
    """An input file cannot be used; the message names the file and the line."""


class GlobusRefused(UsageError):
    """Globus refuses a request until the user does something; the message names the command."""


class CommandNotFound(UsageError):
    """A command of the batch system is not on PATH; the message states where to run instead."""


class PlanningError(FreeTrainError):
    """A policy returned an allocation that violates its contract."""


class CannotFuse(FreeTrainError):
    """Training jobs cannot be computed as one with the same results; the message names the operator or difference."""


class CheckpointError(FreeTrainError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is corrupted: its bytes differ from the ones written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact but belongs to another model, optimizer or dataset."""


class CodeChanged(CheckpointError):
    """A checkpoint is intact, but the training job's code has changed since it was written."""

    resumable = True


class ForeignCheckpoint(CheckpointError):
    """A checkpoint or its directory belongs to another user, or another user could have changed it."""


class StorageUnavailable(CheckpointError):
    """The checkpoint directory is temporarily unusable: full, over quota, read-only, not mounted or failing.

    Parameters
    ----------
    message
        The operation that failed.
    condition
        The condition of the directory alone. Default: `message`.
    """

    transient = True

    def __init__(self, message: str, condition: str = "") -> None:
        super().__init__(message)
        self.condition = condition or message


class CollectionUnavailable(CheckpointError):
    """Globus, or one of its collections, does not answer, or asks to wait.

    Parameters
    ----------
    message
        The request that failed.
    wait
        Seconds for which the service asks to wait; 0 if it does not.
    """

    transient = True

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class TrainingError(FreeTrainError):
    """A training job ended for a reason other than an exception of the user's function."""


class TrainingInterrupted(TrainingError):
    """The run ended before the training job: the driver failed, lost its worker pools, or was shut down.

    The training job itself is not at fault. When run again, it resumes from its newest checkpoint.
    """

    transient = True
    resumable = True


class TrainingCancelled(TrainingError, CancelledError):
    """A training job was cancelled by `FreeTrainExecutor.cancel`; run again, it resumes from its newest checkpoint."""


class PeerFailed(TrainingError):
    """Another member of the process group has failed, and the survivors cannot continue in place.

    Parameters
    ----------
    message
        Description of the failure.
    unreachable
        Pairs of ranks that cannot reach each other over the network, if that is the reason.

    Attributes
    ----------
    step
        Optimizer steps of the training job when it ended in this process.
    """

    transient = True

    def __init__(self, message: str = "", unreachable: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self.step = 0


class StateLost(PeerFailed):
    """The members of a new group do not hold every part of a sharded state: it has to resume from its checkpoint."""


class OutOfSync(PeerFailed):
    """The members of a new group are at different collective calls of their loop, which they cannot make together.

    One that is new has missed a call, or they have different pieces of a batch.
    """


class NonFiniteLoss(TrainingError):
    """The loss of a training job is NaN or infinite, so that continuing is pointless."""


class ReplicasDiffer(TrainingError):
    """The processes of a job no longer have the same model; the message names what differs, where and since when.

    Its function has made them differ, so that running it again helps only after a change.
    """


class TooManyRestarts(TrainingError):
    """A training job's processes keep crashing without reaching a new step, although their nodes were not taken."""


class DriverSuperseded(FreeTrainError):
    """Another driver has taken over the run, while this one was suspended or silent; the message names it."""


class RemoteError(FreeTrainError):
    """Globus Compute, an endpoint or a function there failed or did not answer."""

    transient = True


class BatchSystemError(FreeTrainError):
    """The batch system refused a request or did not answer in time."""

    transient = True
    resumable = True


class UnreadableAnswer(BatchSystemError, ValueError):
    """The output of the batch system cannot be parsed."""


class ClusterGone(BatchSystemError):
    """The embedded cluster is not running, or has stopped."""

    transient = False


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error message: the known word closest to `word`, or an empty string."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
