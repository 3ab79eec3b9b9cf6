"""SGD, Adam and AdamW by their formulas, for the rows of all members at once, each with its own hyperparameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import optim

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORMULAS", "AdamFormula", "Formula", "Hyperparameters", "read_hyperparameters"]

Hyperparameters: TypeAlias = dict[str, list[float]]
"""Name as in a parameter group, ``betas 0`` and ``betas 1`` for a pair -> the value of each member."""


class Formula(Protocol):
    """The formula of an optimizer, for all rows of a segment at once."""

    @property
    def names(self) -> tuple[str, ...]:
        """The hyperparameters that may differ between the members."""

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that have the shape of the parameters."""

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        """Update rows and states in place.

        Parameters
        ----------
        rows, gradients
            Shape [members, elements].
        states
            By name, of the same shape.
        hyper
            See `Hyperparameters`.
        group
            Parameter group of the first member, for the options that are the same for all.
        steps
            Number of this step for each member, from 1.
        """


class _Sgd:
    """As ``torch.optim.SGD``."""

    names = ("lr", "momentum", "dampening", "weight_decay")

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        if any(hyper["weight_decay"]):
            gradients = gradients.addcmul(rows, _column(hyper["weight_decay"], rows))
        if "momentum_buffer" in states:
            buffer = states["momentum_buffer"]
            momentum = _column(hyper["momentum"], rows)
            # The buffer begins as the first gradient, whatever the dampening.
            taken = [
                1.0 if n == 1 or not m else 1 - d
                for n, m, d in zip(steps, hyper["momentum"], hyper["dampening"], strict=True)
            ]
            buffer.mul_(momentum).addcmul_(gradients, _column(taken, rows))
            gradients = gradients.addcmul(buffer, momentum) if group["nesterov"] else buffer
        rows.addcmul_(gradients, _column(hyper["lr"], rows), value=-1)


class AdamFormula:
    """As ``torch.optim.Adam`` and, with decoupled weight decay, ``AdamW``."""

    names = ("lr", "betas", "eps", "weight_decay")

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002 - see `Formula`
        """See `Formula`."""
        return "exp_avg", "exp_avg_sq"

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        """See `Formula`."""
        mean, square = states["exp_avg"], states["exp_avg_sq"]
        lr, first, second = hyper["lr"], hyper["betas 0"], hyper["betas 1"]
        if any(decay := hyper["weight_decay"]):
            if group.get("decoupled_weight_decay", False):
                rows.mul_(_factor([1 - rate * part for rate, part in zip(lr, decay, strict=True)], rows))
            else:
                gradients = gradients.addcmul(rows, _column(decay, rows))
        if _agree(first) and _agree(second):
            mean.lerp_(gradients, 1 - first[0])
            square.mul_(second[0]).addcmul_(gradients, gradients, value=1 - second[0])
        else:
            mean.lerp_(gradients, _column([1 - beta for beta in first], rows).expand_as(rows))
            added = gradients * _column([1 - beta for beta in second], rows)
            square.mul_(_column(second, rows)).addcmul_(gradients, added)
        # The step is lr / (1 - first^n) * mean / (sqrt(square) / sqrt(1 - second^n) + eps).
        divisor = square.sqrt().div_(_factor([math.sqrt(1 - b**n) for b, n in zip(second, steps, strict=True)], rows))
        divisor.add_(_factor(hyper["eps"], rows))
        if all(lr):
            divisor.mul_(_factor([(1 - b**n) / rate for rate, b, n in zip(lr, first, steps, strict=True)], rows))
            rows.addcdiv_(mean, divisor, value=-1)
        else:
            sizes = [rate / (1 - b**n) for rate, b, n in zip(lr, first, steps, strict=True)]
            rows.addcmul_(mean.div(divisor), _column(sizes, rows), value=-1)


class _AdamW(AdamFormula):
    """As ``torch.optim.AdamW``, which older versions of torch do not derive from ``Adam``."""

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        super().update(rows, gradients, states, hyper, {**group, "decoupled_weight_decay": True}, steps)


FORMULAS: dict[type, Formula] = {optim.SGD: _Sgd(), optim.Adam: AdamFormula(), optim.AdamW: _AdamW()}
"""Class of optimizers -> its formula."""


def read_hyperparameters(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> Hyperparameters:
    """Return the hyperparameters of these names in the members' parameter groups."""
    found: Hyperparameters = {}
    for name in names:
        values = [group[name] for group in groups]
        if isinstance(values[0], (tuple, list)):
            for place, part in enumerate(zip(*values, strict=True)):
                found[f"{name} {place}"] = [float(value) for value in part]
        else:
            found[name] = values
    return found


def _agree(values: Sequence[float]) -> bool:
    return values.count(values[0]) == len(values)


def _column(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor:
    """Return the members' values as a column, shape [members, 1]."""
    return torch.tensor(values, dtype=rows.dtype, device=rows.device)[:, None]


def _factor(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor | float:
    """Return the members' values as one number if they agree, which is faster, or as a column."""
    return values[0] if _agree(values) else _column(values, rows)
