"""The parts of a training job in one process, as they are known to what works on one of its tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

from freetrain_parsl.training.recorder import RecordedTraining, Recorder

if TYPE_CHECKING:
    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.protocol.reports import PauseReason
    from freetrain_parsl.training.checkpoints.manager import CheckpointManager
    from freetrain_parsl.training.extension import SessionExtension
    from freetrain_parsl.training.mailbox import Clock, ControlMailbox
    from freetrain_parsl.training.progress import ProgressReporter
    from freetrain_parsl.training.replicas.check import ReplicaCheck

__all__ = ["TrainingParts"]


class TrainingParts(RecordedTraining, Protocol):
    """The parts that `Runtime` has; a protocol, as the runtime imports what works on its tasks."""

    options: SessionOptions
    mailbox: ControlMailbox
    clock: Clock
    recorder: Recorder | None
    extension: SessionExtension
    """That of the prepared objects, once they need one."""
    checkpoint_manager: CheckpointManager
    reporter: ProgressReporter
    replicas: ReplicaCheck
    started: bool
    """Whether the user's loop has begun."""

    def check_running(self) -> None:
        """Raise `Unwind` again if the user's function caught it."""

    def unwind(self, reason: PauseReason) -> NoReturn:
        """Leave the user's function."""
