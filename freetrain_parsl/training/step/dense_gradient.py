"""Gradients that can be summed and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["dense_gradient"]


def dense_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient, or ``None``.

    Raises
    ------
    UsageError
        The gradient is sparse.
    """
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UsageError("session.step: sparse gradients cannot be summed over processes; use sparse=False")
    return parameter.grad
