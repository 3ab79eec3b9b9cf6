"""Operators whose result leaves torch, and those that cannot run on stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.forward.operators.mode import same_for_all

if TYPE_CHECKING:
    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule

_NAMES = {
    torch.Tensor.item: ".item()",
    torch.Tensor.__bool__: "`if`, or bool(),",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__complex__: "complex()",
    torch.Tensor.__index__: "the index",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy.asarray()",
    torch.Tensor.is_nonzero: ".is_nonzero()",
    torch.is_nonzero: "torch.is_nonzero()",
}


def python_value(fused: FusedOperators, func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the value if all members have the same: otherwise they could take different courses from here."""
    if not fused.is_stacked(tensor):
        return NotImplemented
    rows = fused.rows(tensor)
    return fused.level.draw(lambda: same_for_all(_NAMES[func], [func(row, *args, **kwargs) for row in rows.unbind()]))


def requires_grad(fused: FusedOperators, _func: Any, tensor: torch.Tensor, value: bool = True) -> Any:
    """Let gradients reach a tensor, as transformers' hook on embeddings does for activation checkpointing."""
    plain, _ = fused.level.unwrap(tensor)
    with fused.level.suspended():
        if plain.is_leaf:
            plain.requires_grad_(value)
    return tensor


def _refusal(what: str) -> Rule:
    def refuse(fused: FusedOperators, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise CannotFuse(f"{what} inside the model")

    return refuse


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_NAMES, python_value),
    torch.Tensor.requires_grad_: requires_grad,
    torch.Tensor.backward: _refusal("backward()"),
    torch.autograd.grad: _refusal("torch.autograd.grad"),
    torch.autograd.backward: _refusal("torch.autograd.backward"),
    torch.Tensor.register_hook: _refusal("a hook on a tensor's gradient"),
    torch.Tensor.retain_grad: _refusal("retain_grad()"),
}
