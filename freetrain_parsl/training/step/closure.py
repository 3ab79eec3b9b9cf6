"""Steps of optimizers that evaluate the loss several times in each, such as LBFGS."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Kept", "needs_closure", "usage"]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's ``step`` cannot be called without a closure."""
    return _needs_closure(type(optimizer))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _needs_closure(kind: type[Optimizer]) -> bool:
    parameter = inspect.signature(kind.step).parameters.get("closure")
    return parameter is not None and parameter.default is parameter.empty


def usage(optimizer: Optimizer) -> str:
    """Return how to make a step of such an optimizer."""
    return (
        f"{type(optimizer).__name__} gets a closure that computes the loss, and nothing else: write `def closure(): "
        "return loss_function(model(x), y)`, without zero_grad and backward in it, and then `session.step(closure)`"
    )


class Kept:
    """The parameters and the state of an optimizer before a step that may be interrupted half-way."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self._state: dict[Any, Any] = {key: copy.deepcopy(state) for key, state in optimizer.state.items()}

    def restore(self) -> None:
        """Put them back; once."""
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
