"""Dropout and other random operators: each member gets the random numbers that it would get alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.training.fusion.per_member import PerMember

if TYPE_CHECKING:
    from freetrain_parsl.training.fusion.operators.mode import FusedOperators, Rule


def dropout(
    fused: FusedOperators, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Multiply with the noise that torch draws on the CPU; on accelerators, its kernel draws while it multiplies."""
    differs = isinstance(p, PerMember)
    probabilities = p.values if isinstance(p, PerMember) else (p,) * fused.size
    if not training or not any(probabilities):
        return input
    alike = fused.streams.agree and not differs
    ordinary = input.device.type == "cpu" and all(0 < probability < 1 for probability in probabilities)
    if not ordinary or (alike and not fused.is_stacked(input)):
        return fused.row_by_row(func, (input, p, training, inplace), {})
    rows = fused.rows(input)
    if inplace and not fused.is_stacked(input):
        raise CannotFuse("dropout in place of a tensor that is the same for all trainings")
    noise = fused.level.draw(lambda: _shared_noise(fused, rows, p) if alike else _noise(fused, rows, probabilities))
    with fused.level.suspended():
        if inplace:
            rows.mul_(noise)
            return input
        return fused.wrap(rows * noise)


def _shared_noise(fused: FusedOperators, rows: torch.Tensor, probability: float) -> torch.Tensor:
    with fused.streams.shared():
        return _draw(torch.empty_like(rows[0]), probability)


def _noise(fused: FusedOperators, rows: torch.Tensor, probabilities: tuple[float, ...]) -> torch.Tensor:
    noise = []
    for member, probability in enumerate(probabilities):
        with fused.streams.of(member):
            noise.append(_draw(torch.empty_like(rows[member]), probability))
    return torch.stack(noise)


def _draw(noise: torch.Tensor, probability: float) -> torch.Tensor:
    """Fill a tensor with what torch's dropout on the CPU multiplies by; the order depends on its strides."""
    return noise.bernoulli_(1 - probability).div_(1 - probability)


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
