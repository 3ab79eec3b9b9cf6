"""Noting what user code assigns to the states and parameter groups of optimizers, whose values are kept elsewhere."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

__all__ = ["OptimizerWatch"]


class OptimizerWatch:
    """Notes assignments to optimizers since `note`.

    It compares the objects, not their values: it runs in each step, and a loop that assigns nothing has the same ones.

    Parameters
    ----------
    optimizers
        They are watched from now on.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.note()

    def note(self) -> None:
        """Take the states and options as they are now."""
        self._states = [(optimizer.state, _states_of(optimizer)) for optimizer in self._optimizers]
        self._note_options()

    def is_same(self) -> bool:
        """Return whether nothing was assigned."""
        if self._has_lists or not self._has_same_states():
            return False
        return all(
            len(groups) == len(optimizer.param_groups)
            and all(
                len(values) == len(group) and all(map(is_, values, group.values())) and len(group["params"]) == size
                for group, (values, size) in zip(optimizer.param_groups, groups, strict=True)
            )
            for optimizer, groups in zip(self._optimizers, self._options, strict=True)
        )

    def is_alike(self) -> bool:
        """Return whether options were assigned at most other numbers; zero and others are not alike."""
        if not self._has_same_states():
            return False
        kinds = self._kinds
        self._note_options()
        return kinds == self._kinds

    def _note_options(self) -> None:
        self._options = [
            [(list(group.values()), len(group["params"])) for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        # The numbers in a list, as in betas=[0.9, 0.99], can be assigned without a trace.
        self._has_lists = any(
            isinstance(value, list) and name != "params"
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for name, value in group.items()
        )
        self._kinds = [[(size, *map(_kind, values)) for values, size in groups] for groups in self._options]

    def _has_same_states(self) -> bool:
        for optimizer, (state, known) in zip(self._optimizers, self._states, strict=True):
            now = _states_of(optimizer)
            if optimizer.state is not state or len(now) != len(known) or not all(map(is_, now, known)):
                return False
        return True


def _states_of(optimizer: Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def _kind(value: Any) -> object:
    """Return an option of a parameter group, of a number only whether it is zero."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value != 0
    return value if isinstance(value, (bool, str, type(None))) else None
