"""The tensors in what a model returns: in containers, and in objects such as caches, distributions and dataclasses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from freetrain_parsl.errors import CannotFuse

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Structure", "opened", "whole"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), slice, type),
    *(torch.Tensor, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_HEAP_TYPE = 1 << 9  # flag of classes that are not defined in C
_ROOTS = {object, Generic, Protocol}


class Structure(NamedTuple):
    """What `whole` needs besides the leaves."""

    spec: TreeSpec
    """Of the containers."""
    objects: list[tuple[type, Structure] | None]
    """For each leaf of `spec`: the class and the attributes of an object; ``None``: it is a leaf."""


def opened(output: Any, _within: tuple[int, ...] = ()) -> tuple[list[Any], Structure]:
    """Return tensors and plain values of an output, and its structure.

    Containers that torch knows (`torch.utils._pytree`) are opened, and so are objects of classes in Python that hold
    nothing else.

    Raises
    ------
    CannotFuse
        There is something else in it.
    """
    leaves, spec = tree_flatten(output)
    found: list[Any] = []
    objects: list[tuple[type, Structure] | None] = []
    for leaf in leaves:
        if isinstance(leaf, _PLAIN):
            found.append(leaf)
            objects.append(None)
            continue
        if not _can_be_opened(leaf) or id(leaf) in _within:
            raise CannotFuse(
                f"the model returns a {type(leaf).__name__}; only tensors, lists, tuples and dicts are known, and "
                "objects that hold nothing else"
            )
        inner, structure = opened(vars(leaf), (*_within, id(leaf)))
        found += inner
        objects.append((type(leaf), structure))
    return found, Structure(spec, objects)


def whole(leaves: Sequence[Any], structure: Structure) -> Any:
    """Return an output with these leaves in place of those of `opened`; its objects are new ones."""
    output, rest = _whole(list(leaves), structure)
    assert not rest, "all leaves belong to it"
    return output


def _whole(leaves: list[Any], structure: Structure) -> tuple[Any, list[Any]]:
    parts = []
    for known in structure.objects:
        if known is None:
            parts.append(leaves[0])
            leaves = leaves[1:]
            continue
        kind, inner = known
        attributes, leaves = _whole(leaves, inner)
        part: Any = object.__new__(kind)
        vars(part).update(attributes)
        parts.append(part)
    return tree_unflatten(parts, structure.spec), leaves


def _can_be_opened(value: Any) -> bool:
    """Return whether an object is nothing but its attributes, as instances of ordinary classes in Python are."""
    kinds = [kind for kind in type(value).__mro__ if kind not in _ROOTS]
    return (
        not isinstance(value, (nn.Module, BaseException))
        and hasattr(value, "__dict__")
        and all(kind.__flags__ & _HEAP_TYPE and not vars(kind).get("__slots__") for kind in kinds)
    )
