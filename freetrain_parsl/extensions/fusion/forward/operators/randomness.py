"""Dropout and other random operators: each member gets the random numbers that it would get alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.per_member import PerMember, of_member

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule


def dropout(
    fused: FusedOperators, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Multiply with the noise that torch draws on the CPU; on accelerators, its kernel draws while it multiplies."""
    if not training:
        return input
    options = {"inplace": True} if inplace else {}
    if not is_ordinary_dropout(p, input):
        given = fused.wrap(_as_alone(fused.rows(input))) if fused.is_stacked(input) and not inplace else input
        return fused.row_by_row(func, (given, p, training), options)
    if p == 0:
        return input
    if not fused.is_stacked(input):
        if fused.streams.agree and not isinstance(p, PerMember):
            return fused.row_by_row(func, (input, p, training), options)
        if inplace:
            raise CannotFuse("dropout in place of a tensor that is the same for all training jobs")
    rows = fused.rows(input)
    noise = dropout_of_rows(fused, rows, p)
    with fused.level.suspended():
        if inplace:
            rows.mul_(noise)
            return input
        return fused.wrap(rows * noise)


def _as_alone(rows: torch.Tensor) -> torch.Tensor:
    """Return rows that are contiguous if they are part of a larger layout: kernels draw in the order of the memory."""
    is_part = torch.empty_like(rows[0]).stride() != rows[0].stride()
    return rows.contiguous() if is_part else rows


def is_ordinary_dropout(p: float, input: torch.Tensor) -> bool:
    """Return whether dropout of this tensor is a product with `dropout_of_rows`, or changes nothing for all members."""
    values = p.values if isinstance(p, PerMember) else (p,)
    return not any(values) or (input.device.type == "cpu" and all(0 < value < 1 for value in values))


def dropout_of_rows(fused: FusedOperators, rows: torch.Tensor, p: float) -> torch.Tensor:
    """Return what each member's dropout multiplies its row by, drawn as torch does on the CPU."""

    def draw(member: int, probability: float) -> torch.Tensor:  # the order of the numbers depends on the strides
        return torch.empty_like(rows[member]).bernoulli_(1 - probability).div_(1 - probability)

    def for_all() -> torch.Tensor:
        with fused.streams.shared():
            return draw(0, p)

    def for_each() -> torch.Tensor:
        noise = []
        for member in range(fused.size):
            with fused.streams.of(member):
                noise.append(draw(member, of_member(p, member)))
        return torch.stack(noise)

    return fused.level.draw(for_all if fused.streams.agree and not isinstance(p, PerMember) else for_each)


def random_operator(fused: FusedOperators, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw once per member, or once for all if all would draw the same."""
    return fused.row_by_row(func, args, kwargs)


_RANDOM = (
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, torch.rand, torch.randn, torch.randint),
    *(torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like, torch.binomial, torch.rrelu, torch.rrelu_),
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_, torch.native_dropout),
    *(torch.feature_alpha_dropout, torch.feature_alpha_dropout_, F.rrelu, F.alpha_dropout, F.feature_alpha_dropout),
    *(F.dropout1d, F.dropout2d, F.dropout3d, torch.Tensor.bernoulli, torch.Tensor.multinomial),
    *(torch.Tensor.bernoulli_, torch.Tensor.cauchy_, torch.Tensor.exponential_, torch.Tensor.geometric_),
    *(torch.Tensor.log_normal_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.uniform_),
)

RULES: dict[Any, Rule] = {
    F.dropout: dropout,
    torch.dropout: dropout,
    **dict.fromkeys(_RANDOM, random_operator),
}
