"""Learning rates and other hyperparameters that user code sets in a batch: undone if the batch is interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

__all__ = ["Hyperparameters"]


class Hyperparameters:
    """Those of the parameter groups of optimizers, as they are at creation.

    A batch that is interrupted is repeated, and so is what the loop's body does in it: without this, a rate that is
    multiplied in each batch would be multiplied twice.

    Parameters
    ----------
    optimizers
        Of the prepared objects.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Set them to what they were; groups that were added since stay as they are."""
        for group, before in self._groups:
            group.update(before)
