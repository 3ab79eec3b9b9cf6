"""The session's interface for a check of a training function, which observes the training and shortens it.

An ordinary training job has no recorder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
    from freetrain_parsl.training.data.order import Order
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.step.batch_runner import BatchRunner

__all__ = ["RecordedTraining", "Recorder"]


class RecordedTraining(Protocol):
    """The part of the runtime that a recorder sees."""

    state: SessionState
    members: GroupMember
    batch_runner: BatchRunner | None


class Recorder(Protocol):
    """Sees the batches, losses, gradients and boundaries of one process, and may shorten and convert what it trains on.

    A call gets the training job that makes it. None may communicate with other members.
    """

    def order(self, order: Order) -> Order:
        """Return the order of the data to use instead; called by ``session.loader``."""

    def epochs(self, count: int) -> int:
        """Return the number of epochs to train instead; called by ``session.epochs``."""

    def prepared(self, objects: Mapping[str, Stateful]) -> None:
        """See the objects given to ``session.prepare``, before they are restored; may convert their parameters."""

    def started(self) -> None:
        """See that the loop begins, after a newcomer has received its state."""

    def boundary(self, training: RecordedTraining) -> None:
        """See a boundary before its decision is taken."""

    def batch(self, data: Any) -> Any:
        """Return the data for the user's loop instead of a batch; called after the random numbers were seeded."""

    def loss(self, training: RecordedTraining, loss: torch.Tensor) -> None:
        """See a loss before its gradients are computed."""

    def gradients(self, training: RecordedTraining) -> None:
        """See that a piece's gradients are computed; after the last piece, the whole batch's."""

    def step(self) -> None:
        """See that an optimizer step was made."""
