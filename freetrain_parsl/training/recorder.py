"""What a check of a training function needs of a session: to see it train, and to shorten it.

An ordinary training has no recorder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from freetrain_parsl.training.checkpoints.state import Stateful
    from freetrain_parsl.training.data.order import Order
    from freetrain_parsl.training.runtime import Runtime

__all__ = ["Recorder"]


class Recorder(Protocol):
    """Sees the batches, losses, gradients and boundaries of one process, and may shorten and convert what it trains on.

    A call gets the runtime that makes it. None may communicate with other members.
    """

    def order(self, order: Order) -> Order:
        """Return the order of the data to use instead; called by ``session.loader``."""

    def epochs(self, count: int) -> int:
        """Return the number of epochs to train instead; called by ``session.epochs``."""

    def prepared(self, objects: Mapping[str, Stateful]) -> None:
        """See the objects given to ``session.prepare``, before they are restored; may convert their parameters."""

    def started(self) -> None:
        """See that the loop begins, after a newcomer has received its state."""

    def boundary(self, runtime: Runtime) -> None:
        """See a boundary before it is decided there how to go on."""

    def batch(self, data: Any) -> Any:
        """Return what the user's loop gets instead of a batch, after its random numbers were seeded."""

    def loss(self, runtime: Runtime, loss: torch.Tensor) -> None:
        """See a loss before its gradients are computed."""

    def gradients(self, runtime: Runtime) -> None:
        """See that the gradients of a piece are there; of the last one, that they are those of the whole batch."""

    def step(self) -> None:
        """See that an optimizer step was made."""
