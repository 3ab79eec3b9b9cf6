"""Noting what user code assigns to the states and parameter groups of optimizers, whose values are kept elsewhere."""

from __future__ import annotations

from numbers import Real
from operator import is_
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from freetrain_parsl.training.step.bypass import BypassCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.optim import Optimizer

__all__ = ["OptimizerWatch", "has_own_steps", "is_constant", "versions_of"]


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
        self._steps = [_steps_of(optimizer) for optimizer in self._optimizers]
        self._hooks = _hooks_of_all()
        self._note_options()

    def is_same(self) -> bool:
        """Return whether nothing was assigned."""
        if self._has_changeable or not self._has_same_states() or not self._makes_same_steps():
            return False
        return all(
            len(groups) == len(optimizer.param_groups)
            and all(
                len(values) == len(group)
                and all(map(is_, values, group.values()))
                and len(parameters) == len(group["params"])
                and all(map(is_, parameters, group["params"]))
                for group, (values, parameters) in zip(optimizer.param_groups, groups, strict=True)
            )
            for optimizer, groups in zip(self._optimizers, self._options, strict=True)
        )

    def is_alike(self) -> bool:
        """Return whether options were assigned at most other numbers; zero and others are not alike."""
        if not self._has_same_states() or not self._makes_same_steps():
            return False
        kinds = self._kinds
        self._note_options()
        return kinds == self._kinds

    def has_states_of(self, number: int) -> bool:
        """Return whether an optimizer has the states that it had."""
        state, known = self._states[number]
        now = _states_of(self._optimizers[number])
        return self._optimizers[number].state is state and len(now) == len(known) and all(map(is_, now, known))

    def _has_same_states(self) -> bool:
        return all(map(self.has_states_of, range(len(self._optimizers))))

    def _makes_same_steps(self) -> bool:
        return self._hooks == _hooks_of_all() and all(
            _steps_of(optimizer) == steps for optimizer, steps in zip(self._optimizers, self._steps, strict=True)
        )

    def _note_options(self) -> None:
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        self._options = [[(list(group.values()), list(group["params"])) for group in each] for each in groups]
        # Numbers in a list, as in betas=[0.9, 0.99], or in a tensor can be changed without a trace.
        self._has_changeable = any(
            not is_constant(value)
            for each in groups
            for group in each
            for name, value in group.items()
            if name not in ("params", "param_names")
        )
        self._kinds = [
            [
                (
                    *map(id, group["params"]),
                    *((name, _kind(value)) for name, value in group.items() if name != "params"),
                )
                for group in each
            ]
            for each in groups
        ]


def is_constant(value: Any) -> bool:
    """Return whether an option of a parameter group has no parts that can be changed in place."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return isinstance(value, (str, Real, type(None)))


def has_own_steps(optimizer: Optimizer) -> bool:
    """Return whether code of the user's runs in its steps: hooks, or another `step`; schedulers only count them."""
    before, after, step = _steps_of(optimizer)
    return bool(before or after or _hooks_of_all()) or not (step is None or hasattr(step, "_wrapped_by_lr_sched"))


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [tensor._version for tensor in tensors]


def _steps_of(optimizer: Optimizer) -> tuple[int, int, Any]:
    """Return the number of hooks before and after steps, and the object's own `step`, which schedulers assign."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return len(hooks[0]), len(hooks[1]), vars(optimizer).get("step")


def _hooks_of_all() -> list[object]:
    """Return the user's hooks of the steps of all optimizers."""
    hooks = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    return [hook for hook in hooks if not BypassCheck.is_own_hook(hook)]


def _states_of(optimizer: Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def _kind(value: Any) -> object:
    """Return an option of a parameter group, of a number only whether it is zero."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_kind, value)
    if isinstance(value, (bool, str, type(None))):
        return value
    return value != 0 if isinstance(value, Real) else type(value)
