"""A model with other parameters, buffers and numbers for the duration of a call."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from freetrain_parsl.errors import CannotFuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

Place = dict[str, Any]

_COLLECTIONS = {list, dict, set}
_OF_MODULES = {"_parameters", "_modules", "_non_persistent_buffers_set"}


class _Layout:
    """Where the tensors of a model are; found once, because that takes longer than a small model's step.

    Parameters
    ----------
    model
        The model.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.modules = list(model.named_modules())
        self.attributes = [vars(module) for _, module in self.modules]
        places = [place for module in model.modules() for place in (module._parameters, module._buffers) if place]
        self.tensors = [
            (place, key, names[id(tensor)]) for place in places for key, tensor in place.items() if tensor is not None
        ]
        self.buffers = [
            (module._buffers, key, names[id(buffer)])
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.recurrent = [vars(module) for module in model.modules() if isinstance(module, nn.RNNBase)]
        self.collections = [
            value
            for attributes in self.attributes
            for name, value in attributes.items()
            if type(value) in _COLLECTIONS and name not in _OF_MODULES
        ]
        self._keys = [(place, _keys(place)) for place in places]
        self._children = [(module._modules, list(module._modules.values())) for module in model.modules()]

    def is_current(self) -> bool:
        """Return whether the model still has these modules, parameters and buffers."""
        return all(list(now.values()) == before for now, before in self._children) and all(
            _keys(place) == keys for place, keys in self._keys
        )


def _keys(place: Place) -> list[str]:
    return [key for key, tensor in place.items() if tensor is not None]


_LAYOUTS: WeakKeyDictionary[nn.Module, _Layout] = WeakKeyDictionary()


def _layout_of(model: nn.Module) -> _Layout:
    layout = _LAYOUTS.get(model)
    if layout is None or not layout.is_current():
        layout = _LAYOUTS[model] = _Layout(model)
    return layout


def _leave_apart() -> None:
    """Do nothing: the parameters stay where they are."""


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

    Raises
    ------
    CannotFuse
        If the model has changed other attributes: those of the other members would be as before.
    """
    layout = _layout_of(model)
    before = [dict(attributes) for attributes in layout.attributes]
    sizes = [len(collection) for collection in layout.collections]
    replaced: list[tuple[Place, str, Any]] = []

    def replace(place: Place, key: str, value: Any) -> None:
        replaced.append((place, key, place[key]))
        place[key] = value

    def current() -> dict[str, torch.Tensor | None]:
        return {name: place.get(key) for place, key, name in layout.buffers}

    try:
        for place, key, name in layout.tensors:
            replace(place, key, tensors[name])
        for recurrent in layout.recurrent:  # such a module notices that its parameters are others, and lists them anew
            replace(recurrent, "_flat_weights", recurrent["_flat_weights"])
            replace(recurrent, "_flat_weight_refs", recurrent["_flat_weight_refs"])
            recurrent["flatten_parameters"] = _leave_apart  # on a GPU it would move the parameters to memory of its own
        for path, number in numbers.items():
            owner, _, attribute = path.rpartition(".")
            replace(vars(model.get_submodule(owner)), attribute, number)
        yield current
    finally:
        for place, key, value in reversed(replaced):
            place[key] = value
        for recurrent in layout.recurrent:
            recurrent.pop("flatten_parameters", None)
        changed = _restore_attributes(layout, before, sizes)
    if changed is not None:
        raise CannotFuse(f"the model changes its attribute {changed}")


def _restore_attributes(layout: _Layout, before: list[Place], sizes: list[int]) -> str | None:
    """Restore attributes that were assigned or removed, and return the path of one, or of one with another size."""
    changed = None
    for (path, _), now, attributes in zip(layout.modules, layout.attributes, before, strict=True):
        if len(now) != len(attributes) or not all(map(operator.is_, now.values(), attributes.values())):
            nothing = object()
            name = next(
                key for key in {**now, **attributes} if now.get(key, nothing) is not attributes.get(key, nothing)
            )
            changed = f"{path}.{name}".lstrip(".")
            now.clear()
            now.update(attributes)
    for collection, size in zip(layout.collections, sizes, strict=True):
        if len(collection) != size:
            owners = zip(layout.modules, layout.attributes, strict=True)
            changed = next(
                f"{path}.{name}".lstrip(".")
                for (path, _), attributes in owners
                for name, value in attributes.items()
                if value is collection
            )
    return changed
