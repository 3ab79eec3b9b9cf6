"""One call of a model for all members of an array: the first member's modules, with the parameters of all."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.forward.operators import fused_operators
from freetrain_parsl.extensions.fusion.forward.swapping import swapped
from freetrain_parsl.extensions.fusion.forward.vmap_level import new_level
from freetrain_parsl.training.data import random_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from freetrain_parsl.extensions.fusion.engine.per_member import PerMember, RandomStreams
    from freetrain_parsl.extensions.fusion.forward.vmap_level import VmapLevel

_ABOUT_VMAP = ("vmap", "functorch", "batching rule", "Batching rule", "BatchedTensor")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice)


@dataclass(frozen=True)
class Stacked:
    """An argument that differs between the members: row `i` of `tensor` is that of member `i`."""

    tensor: torch.Tensor


def fused_call(
    template: nn.Module,
    function: Callable[..., Any],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    streams: RandomStreams,
    *,
    differing: Mapping[str, PerMember] | None = None,
) -> Any:
    """Call a function of a model once for all members.

    Gradient mode, autocast, `training` and hooks are those of the moment. After an error, the template is as before,
    but buffers and random numbers may have advanced: the caller restores them.

    Parameters
    ----------
    template
        The model of one member; its parameters and buffers are replaced for the duration of the call.
    function
        Called with `args` and `kwargs`, such as ``template.__call__``.
    parameters, buffers
        Name, as in ``named_parameters`` and ``named_buffers``, -> stack of all members' values, [B, …]. Buffers are
        updated in place.
    args, kwargs
        Lists, tuples and dicts of anything; what differs between the members is `Stacked`.
    streams
        The members' random numbers.
    differing
        Path of an attribute of a module, such as ``blocks.0.drop.p``, -> the members' numbers.

    Returns
    -------
    Any
        What `function` returns, with the stack [B, …] in place of each tensor.

    Raises
    ------
    CannotFuse
        If the results could differ from those that each member has alone.
    """
    stacks = {**parameters, **buffers}
    if not stacks:
        raise CannotFuse("the model has no parameters")
    level = new_level(len(next(iter(stacks.values()))))
    leaves, structure = tree_flatten((args, dict(kwargs)))
    versions = [(tensor, tensor._version) for tensor in _tensors(leaves)]

    def call() -> Any:
        given, named = tree_unflatten([_argument(leaf, level) for leaf in leaves], structure)
        tensors = {name: level.wrap(stack) for name, stack in stacks.items()}
        with swapped(template, tensors, differing or {}) as current_buffers:
            with fused_operators(level, streams):
                output = function(*given, **named)
            for name, buffer in current_buffers().items():
                if buffer is not tensors[name]:
                    _keep(name, buffer, buffers[name], level)
        return _outputs(output, level)

    with _no_other_random_numbers():
        try:
            output = level.run(call)
        except RuntimeError as error:
            if any(word in str(error) for word in _ABOUT_VMAP):
                raise CannotFuse(_reason(error)) from error
            raise
    if any(tensor._version != version for tensor, version in versions):
        raise CannotFuse("the model changes its input in place")
    return output


def _reason(error: RuntimeError) -> str:
    if "setup_context staticmethod" in str(error):
        return "an autograd.Function without setup_context(), as in activation checkpointing, inside the model"
    return str(error).strip().partition("\n")[0]


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    plain = [leaf.tensor if isinstance(leaf, Stacked) else leaf for leaf in leaves]
    return [leaf for leaf in plain if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _argument(leaf: Any, level: VmapLevel) -> Any:
    return level.wrap(leaf.tensor) if isinstance(leaf, Stacked) else leaf


def _outputs(output: Any, level: VmapLevel) -> Any:
    if isinstance(output, torch.Tensor):
        return level.rows(output)
    leaves, structure = tree_flatten(output)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise CannotFuse(
                f"the model returns a {type(leaf).__name__}; only tensors, lists, tuples and dicts are known"
            )
    return tree_unflatten([level.rows(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)


def _keep(name: str, new: torch.Tensor | None, stack: torch.Tensor, level: VmapLevel) -> None:
    """Write a buffer that was assigned anew into the stack."""
    if new is None or new.shape != stack.shape[1:] or new.dtype != stack.dtype:
        raise CannotFuse(f"the model assigns a buffer of another shape or type to {name}")
    rows = level.rows(new).detach()
    with level.suspended(), torch.no_grad():
        stack.copy_(rows)


@contextlib.contextmanager
def _no_other_random_numbers() -> Iterator[None]:
    """Refuse models that draw from the generators of Python or numpy: only those of torch are kept for each member."""
    before = random_streams.host_places()
    yield
    if random_streams.host_places() != before:
        raise CannotFuse("the model draws from the generators of Python or numpy")
