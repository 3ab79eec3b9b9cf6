"""LoRA layers of PEFT, in which rank, alpha and scale may differ between the members of an array.

Members of a lower rank are padded with zeros to the largest one. Columns of B and rows of A are zero together, so that
the gradient of each is a product with the other's zeros: the padding stays zero with every elementwise optimizer whose
``eps`` is not. Only layers of PEFT's own classes are known to use these numbers in this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.extensions.fusion.engine.per_member import PerMember

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

__all__ = [
    "common_shape",
    "free_attributes",
    "is_scale",
    "padded",
    "per_member_scales",
    "rank_dimensions",
    "shape_without",
    "within",
    "without_ranks",
]

_CLASSES = "peft.tuners.lora."
_NUMBERS = {"r", "lora_alpha", "use_rslora"}  # of a layer: the scale follows from them
_SIZES = {"in_features", "out_features", "in_channels", "out_channels"}  # of the adapters, in which the rank is one
_ADAPTERS = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}  # -> dimension of the rank
_FREE_OPTIONS = {"r", "lora_alpha", "use_rslora", "lora_dropout", "rank_pattern", "alpha_pattern"}


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the LoRA layers of PEFT's own classes by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).__module__.startswith(_CLASSES) and hasattr(module, "lora_A") and hasattr(module, "scaling")
    }


def free_attributes(model: nn.Module) -> dict[str, set[str]]:
    """Return, by a module's path, its attributes that may differ without any effect on a fused call."""
    free: dict[str, set[str]] = {}
    for path, layer in _layers(model).items():
        free[path] = _NUMBERS
        for name in _ADAPTERS:
            for adapter, _ in getattr(layer, name).named_children():
                free[f"{path}.{name}.{adapter}".lstrip(".")] = _SIZES
    return free


def is_scale(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is a dictionary of scales: operators get those of all members."""
    return name == "scaling" and type(module).__module__.startswith(_CLASSES)


def per_member_scales(values: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Return the scales of a layer of all members, by the names of their adapters; ``None``: the names differ."""
    if any(value.keys() != values[0].keys() for value in values):
        return None
    return {
        name: scales[0] if len(set(scales)) == 1 else PerMember(scales)
        for name in values[0]
        if (scales := [value[name] for value in values])
    }


def without_ranks(value: Any) -> Any:
    """Return PEFT's configurations of LoRA, in a dictionary, without the options that may differ."""
    if type(value) is not dict or not any(type(each).__module__.startswith(_CLASSES) for each in value.values()):
        return value
    return {
        name: (type(each), {option: given for option, given in vars(each).items() if option not in _FREE_OPTIONS})
        for name, each in value.items()
    }


def rank_dimensions(models: Iterable[nn.Module]) -> dict[int, int]:
    """Return identity of a parameter -> its dimension whose size may differ."""
    return {
        id(parameter): dimension
        for model in models
        for layer in _layers(model).values()
        for name, dimension in _ADAPTERS.items()
        for parameter in getattr(layer, name).parameters()
        if parameter.dim() > 1  # not the bias of B
    }


def shape_without(shape: torch.Size, dimension: int | None) -> tuple[int | None, ...]:
    """Return a shape with ``None`` in place of the size of a dimension."""
    return tuple(None if place == dimension else size for place, size in enumerate(shape))


def common_shape(shapes: Iterable[torch.Size]) -> torch.Size:
    """Return the smallest shape that contains all of these."""
    return torch.Size(map(max, zip(*shapes, strict=True)))


def padded(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return values with zeros up to a shape."""
    if values.shape == shape:
        return values
    result = values.new_zeros(shape)
    within(result, values.shape).copy_(values)
    return result


def within(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the part of padded values that has a shape, a view."""
    if values.shape == shape:
        return values
    for dimension, size in enumerate(shape):
        values = values.narrow(dimension, 0, size)
    return values
