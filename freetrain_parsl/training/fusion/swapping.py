"""A model with other parameters, buffers and numbers for the duration of a call."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


@contextlib.contextmanager
def swapped(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]
) -> Iterator[Callable[[], dict[str, torch.Tensor | None]]]:
    """Replace a model's parameters, buffers and attributes, and restore them afterwards.

    Parameters
    ----------
    model
        The model.
    tensors
        Name of every parameter and buffer -> its replacement.
    numbers
        Path of an attribute, such as ``blocks.0.drop.p``, -> its replacement.

    Yields
    ------
    callable
        Returns the buffers of the moment by name: the model may have assigned other tensors.
    """
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    buffers: list[tuple[nn.Module, str, str]] = []

    def current() -> dict[str, torch.Tensor | None]:
        return {name: module._buffers.get(key) for module, key, name in buffers}

    def replace(place: dict[str, Any], key: str, value: Any) -> None:
        replaced.append((place, key, place[key]))
        place[key] = value

    try:
        for module in model.modules():
            buffers += [(module, key, names[id(old)]) for key, old in module._buffers.items() if old is not None]
            for place in (module._parameters, module._buffers):
                for key, old in place.items():
                    if old is not None:
                        replace(place, key, tensors[names[id(old)]])
            if isinstance(module, nn.RNNBase):  # notices that its parameters are others, and lists them anew
                for key in ("_flat_weights", "_flat_weight_refs"):
                    replace(vars(module), key, vars(module)[key])
        for path, number in numbers.items():
            owner, _, attribute = path.rpartition(".")
            replace(vars(model.get_submodule(owner)), attribute, number)
        yield current
    finally:
        for place, key, value in reversed(replaced):
            place[key] = value
