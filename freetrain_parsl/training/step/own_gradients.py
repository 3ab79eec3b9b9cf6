"""The gradients on one member: over the pieces of a batch, between which user code does not see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["OwnGradients"]


class OwnGradients:
    """The ``.grad`` of the parameters.

    Parameters
    ----------
    parameters
        Those of the models, then those only in an optimizer; each once.
    spread
        Those whose gradients the extension averages over the members.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], spread: set[nn.Parameter]) -> None:
        self._parameters = parameters
        self._spread = spread
        self.summed = [parameter for parameter in parameters if parameter not in spread]
        """Those whose gradients the session sums over the members."""
        self._hidden: list[torch.Tensor | None] | None = None

    def any(self) -> bool:
        """Return whether there is one that is not zero."""
        return any(p.grad is not None and (p in self._spread or bool(p.grad.any())) for p in self._parameters)

    def reset(self) -> None:
        """Reset them."""
        for parameter in self._parameters:
            parameter.grad = None

    def hide(self) -> None:
        """Hide those of the pieces so far from user code that runs between backward and step."""
        self._hidden = [parameter.grad for parameter in self._parameters]
        self.reset()

    @property
    def are_hidden(self) -> bool:
        """Whether there are hidden ones."""
        return self._hidden is not None

    def forget(self) -> None:
        """Forget those that are hidden: the batch is interrupted."""
        self._hidden = None

    def show(self) -> None:
        """Set ``.grad`` to what is hidden, if there is any, so that a backward pass adds to it."""
        if self._hidden is not None:
            for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
                parameter.grad = gradient
            self._hidden = None

    def add_hidden(self) -> None:
        """Add what is hidden to the gradients of a piece that was computed without it."""
        if self._hidden is not None:
            for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad = gradient.add_(parameter.grad)
            self._hidden = None

    def multiply(self, factor: torch.Tensor | float) -> None:
        """Multiply all of them."""
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad *= factor

    def divide_summed(self, number: int) -> None:
        """Divide those that are summed, if there are others, which are averaged over this number of members."""
        for parameter in self.summed if self._spread else ():
            if parameter.grad is not None:
                parameter.grad /= number
