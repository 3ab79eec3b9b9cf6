"""Optimizer steps of all members of an array at once, on rows instead of single parameters.

Three ways, the first that is possible: SGD, Adam and AdamW for all rows, each with the hyperparameters of its member;
for torch's other elementwise optimizers, one hidden optimizer of the same class for each member, whose parameters are
the member's whole rows; otherwise each member's own optimizer. The members' optimizers keep their parameter groups,
which schedulers change, and their states: views of the rows' states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import optim

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.optimizers.formulas import (
    FORMULAS,
    AdamFormula,
    AdamKernels,
    FormulaOptimizer,
    has_kernels,
)
from freetrain_parsl.extensions.fusion.optimizers.hidden_optimizers import HiddenOptimizers
from freetrain_parsl.extensions.fusion.optimizers.optimizer_watch import has_own_steps, is_constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from freetrain_parsl.extensions.fusion.engine.array import MemberObjects, Segment

__all__ = ["RowOptimizer", "check_optimizers", "check_parameters", "row_optimizer"]

_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.Adadelta, optim.Adamax,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
_UNUSUAL = ("maximize", "amsgrad", "differentiable", "capturable")
_SWITCHES = ("nesterov", "decoupled_weight_decay", "fused")
"""Options by which the formula or its states differ."""
_FORMULA_TYPES = (torch.float32, torch.float64)
"""Others would round numbers that differ between the members, such as 0.999 to 1; torch's optimizers do not."""


class RowOptimizer(Protocol):
    """Makes the steps of one optimizer of all members."""

    uniform: bool
    """Whether all parameters of a member have made the same steps, so that `step` can be used."""

    def is_current(self) -> bool:
        """Return whether the members' optimizers have the states and options that this one knows."""

    def step(self) -> None:
        """Make a step of all members, on complete gradients of their rows; `is_current` has returned true."""

    def hand_over(self) -> None:
        """Give the members' optimizers their states, before they are used or saved."""

    def take_over(self) -> None:
        """Take the states of the members' optimizers."""

    def release(self) -> None:
        """Give the members' optimizers their states for good."""

    def discard(self) -> None:
        """Leave the members' optimizers as they are: user code has changed them, and another one takes their states."""


def row_optimizer(optimizers: Sequence[Optimizer], segments: Sequence[Segment]) -> RowOptimizer:
    """Return the fastest way to step these optimizers, one for each member.

    Parameters
    ----------
    optimizers
        Of the same class, with the same parameter groups.
    segments
        The segments of their trainable parameters.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    plain = (
        type(optimizers[0]) in _ELEMENTWISE
        and not any(_has_changeable(group) for group in groups)
        and not any(has_own_steps(optimizer) for optimizer in optimizers)
    )
    if not plain or not segments:  # all parameters can be frozen
        return OwnOptimizers(optimizers)
    formula = FORMULAS.get(type(optimizers[0]))
    usual = not any(group.get(name) for group in groups for name in _UNUSUAL)
    alike = all(len({group.get(name) for group in each}) == 1 for each in _by_place(optimizers) for name in _SWITCHES)
    precise = all(segment.rows.dtype in _FORMULA_TYPES for segment in segments)
    if formula is not None and usual and alike and precise:
        if isinstance(formula, AdamFormula) and has_kernels(segments):
            return AdamKernels(optimizers, segments, formula)
        return FormulaOptimizer(optimizers, segments, formula)
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return OwnOptimizers(optimizers)
    return HiddenOptimizers(optimizers, segments)


def check_optimizers(members: Sequence[MemberObjects]) -> None:
    """Check that the members have the same optimizers over the same parameters.

    Raises
    ------
    CannotFuse
        They have not, or a parameter is listed more than once: each time, it is stepped.
    """
    first = members[0]
    for member in members:
        listed = [id(p) for optimizer in member.optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(set(listed)) < len(listed):
            raise CannotFuse("a parameter is in two optimizers, or twice in one")
    for other in members[1:]:
        if len(other.models) != len(first.models):
            raise CannotFuse(f"the training jobs have {len(first.models)} and {len(other.models)} models")
        if [type(optimizer) for optimizer in other.optimizers] != [type(optimizer) for optimizer in first.optimizers]:
            names = [" and ".join(type(o).__name__ for o in member.optimizers) for member in (first, other)]
            raise CannotFuse(f"the training jobs have different optimizers: {names[0]}, {names[1]}")


def check_parameters(members: Sequence[MemberObjects]) -> None:
    """Check that the members' optimizers have the same parameters in the same groups, now that the models are alike.

    Raises
    ------
    CannotFuse
        They have not.
    """
    kinds = [member.parameter_kinds() for member in members]
    if any(each != kinds[0] for each in kinds):
        raise CannotFuse("the training jobs have different parameters, or other parameter groups in their optimizers")


class OwnOptimizers:
    """Each member's own optimizer; for those that are not elementwise, or not torch's."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    uniform = True

    def is_current(self) -> bool:
        """See `RowOptimizer`: nothing is kept elsewhere."""
        return True

    def step(self) -> None:
        """See `RowOptimizer`; needs the gradients in the parameters' ``.grad``."""
        for optimizer in self._optimizers:
            optimizer.step()

    def hand_over(self) -> None:
        """See `RowOptimizer`: they have them."""

    def take_over(self) -> None:
        """See `RowOptimizer`: they have them."""

    def release(self) -> None:
        """See `RowOptimizer`: they have them."""

    def discard(self) -> None:
        """See `RowOptimizer`."""


def _by_place(optimizers: Sequence[Optimizer]) -> list[tuple[dict[str, Any], ...]]:
    """Return, for each place of a parameter group, those of all members."""
    return list(zip(*(optimizer.param_groups for optimizer in optimizers), strict=True))


def _has_changeable(group: dict[str, Any]) -> bool:
    """Return whether an option is a tensor or the like; lists of numbers are read in each step."""
    options = [tuple(value) if isinstance(value, list) else value for name, value in group.items() if name != "params"]
    return not all(map(is_constant, options))
