"""Which parameters have been frozen or unfrozen in the loop: the flags are in no ``state_dict``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["TrainableFlags"]


class TrainableFlags:
    """The ``requires_grad`` of parameters, as far as the loop has changed it.

    Only the changes are saved and sent. What the user's function sets before its loop is set again in each process, and
    may have been edited since a checkpoint was written.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._initial: dict[str, bool] = {}

    def watch(self, objects: Mapping[str, object]) -> None:
        """Note the flags of all parameters at the start of the loop."""
        self._parameters = dict(_parameters_of(objects))
        self._initial = {name: parameter.requires_grad for name, parameter in self._parameters.items()}

    def changes(self) -> dict[str, bool]:
        """Return the flags that have changed: parameter -> flag."""
        flags = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
        return {name: flag for name, flag in flags.items() if flag != self._initial[name]}

    def load(self, changes: Mapping[str, bool]) -> None:
        """Make the changes of a state, and undo those that it does not have."""
        for name, parameter in self._parameters.items():
            flag = changes.get(name, self._initial[name])
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _parameters_of(objects: Mapping[str, object]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            for inner, parameter in thing.named_parameters():
                yield f"{name}.{inner}", parameter
