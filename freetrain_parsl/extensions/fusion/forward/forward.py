"""One call of a model for all members of an array: the first member's modules, with the parameters of all."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.per_member import PerMember
from freetrain_parsl.extensions.fusion.forward.checkpointing import fused_checkpointing
from freetrain_parsl.extensions.fusion.forward.operators import fused_operators, reason_of
from freetrain_parsl.extensions.fusion.forward.operators.functions import functions_as_operators
from freetrain_parsl.extensions.fusion.forward.outputs import opened, whole
from freetrain_parsl.extensions.fusion.forward.shared_base import ChangesShared, SharedTensor
from freetrain_parsl.extensions.fusion.forward.sparse import is_sparse
from freetrain_parsl.extensions.fusion.forward.vmap_level import new_level
from freetrain_parsl.training.data import random_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from freetrain_parsl.extensions.fusion.engine.per_member import Differing, RandomStreams
    from freetrain_parsl.extensions.fusion.forward.vmap_level import VmapLevel


Place = dict[str, Any]

_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)
_CHANGES = "the model changes its attribute {}: return the value, or write it to a buffer"
_COLLECTIONS = {list, dict, set}
_OF_MODULES = {"_parameters", "_modules", "_non_persistent_buffers_set"}
_ABOUT_VMAP = ("vmap", "functorch", "batching rule", "Batching rule", "BatchedTensor")


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
    model: nn.Module, tensors: Mapping[str, torch.Tensor], numbers: Differing, assigned: Place
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
    assigned
        Gets path -> value of what the model assigns to its other attributes meanwhile.

    Yields
    ------
    callable
        Returns the buffers of the moment by name: the model may have assigned other tensors.

    Raises
    ------
    CannotFuse
        If the model has removed attributes, or changed a number, a list, a dictionary or a set: those of the other
        members would be as before.
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
        changed = _restore_attributes(layout, before, sizes, assigned)
    if changed is not None:
        raise CannotFuse(_CHANGES.format(changed))


def _restore_attributes(layout: _Layout, before: list[Place], sizes: list[int], assigned: Place) -> str | None:
    """Restore attributes; note those that were assigned, and return the path of one that is not to be.

    Such as a count of the calls, which others that join later would not have.
    """
    changed = None
    nothing = object()
    for (path, _), now, attributes in zip(layout.modules, layout.attributes, before, strict=True):
        if len(now) != len(attributes) or not all(map(operator.is_, now.values(), attributes.values())):
            for key in {**now, **attributes}:
                one, other = attributes.get(key, nothing), now.get(key, nothing)
                numbers = _is_number(one) and _is_number(other)
                if other is nothing or (numbers and one != other):
                    changed = f"{path}.{key}".lstrip(".")
                elif one is not other and not numbers:
                    assigned[f"{path}.{key}".lstrip(".")] = other
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Stacked:
    """An argument that differs between the members: row `i` of `tensor` is that of member `i`."""

    tensor: torch.Tensor


def fused_call(
    template: nn.Module,
    function: Callable[..., Any],
    parameters: Mapping[str, torch.Tensor | SharedTensor],
    buffers: Mapping[str, torch.Tensor | SharedTensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    streams: RandomStreams,
    *,
    differing: Differing | None = None,
    assigned: Place | None = None,
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
        Name, as in ``named_parameters`` and ``named_buffers``, -> stack of all members' values, [B, …], or the one
        value that all have. Stacks of buffers are updated in place.
    args, kwargs
        Lists, tuples and dicts of anything; what differs between the members is `Stacked`.
    streams
        The members' random numbers.
    differing
        Path of an attribute of a module, such as ``blocks.0.drop.p``, -> the members' numbers.
    assigned
        Gets path -> value of the attributes that the model has assigned, as a mask that it keeps for the next call: for
        `assign`. Their values are the same for all members, as all attributes were equal before. ``None``: there may be
        none.

    Returns
    -------
    Any
        What `function` returns, with the stack [B, …] in place of each tensor; see `opened`.

    Raises
    ------
    ChangesShared
        If the model writes to a parameter or buffer that was given as the one value of all members.
    CannotFuse
        If the results could differ from those that each member has alone.
    """
    stacks = {**parameters, **buffers}
    if not stacks:
        raise CannotFuse("the model has no parameters")
    level = new_level(len(streams))
    leaves, structure = tree_flatten((args, dict(kwargs)))
    versions = [(tensor, tensor._version) for tensor in _tensors(leaves)]
    shared = [
        (name, each.tensor, each.tensor._version) for name, each in stacks.items() if isinstance(each, SharedTensor)
    ]

    notes: Place = {} if assigned is None else assigned

    def within(inside: VmapLevel, numbers: RandomStreams, function: Callable[[], Any], notes: Place) -> Any:
        """Call a function in a level, with the stacks in the template."""
        tensors = {
            name: stack.tensor if isinstance(stack, SharedTensor) else inside.wrap(stack)
            for name, stack in stacks.items()
        }
        with swapped(template, tensors, differing or {}, notes) as current_buffers:
            with (
                fused_operators(inside, numbers) as fused,
                fused_checkpointing(fused, again),
                functions_as_operators(),
            ):
                result = function()
            for name, buffer in current_buffers().items():
                if buffer is not tensors[name]:
                    _keep(name, buffer, buffers[name], inside)
        _check_same_for_all(notes, None if assigned is None else inside)
        return result

    def again(numbers: RandomStreams, function: Callable[[], Any]) -> None:
        """Compute a part of the forward pass again, in the backward pass."""
        inside = new_level(level.size)
        inside.run(lambda: within(inside, numbers, function, {}))  # assigns the same; else verification has failed

    def call() -> Any:
        given, named = tree_unflatten([_argument(leaf, level) for leaf in leaves], structure)
        return _outputs(within(level, streams, lambda: function(*given, **named), notes), level)

    with _no_other_random_numbers():
        try:
            output = level.run(call)
        except RuntimeError as error:
            if any(word in str(error) for word in _ABOUT_VMAP):
                raise CannotFuse(reason_of(error)) from error
            raise
    if changed := [name for name, tensor, version in shared if tensor._version != version]:
        raise ChangesShared(f"the model changes {changed[0]}, which is the same for all training jobs")
    if any(tensor._version != version for tensor, version in versions):
        raise CannotFuse("the model changes its input in place")
    return output


def assign(models: Sequence[nn.Module], assigned: Mapping[str, Any]) -> None:
    """Give the members' models the attributes that the fused call of one has assigned."""
    for path, value in assigned.items():
        owner, _, attribute = path.rpartition(".")
        for model in models:
            own = value.clone() if isinstance(value, torch.Tensor) else value
            vars(model.get_submodule(owner))[attribute] = own


def _check_same_for_all(assigned: Mapping[str, Any], level: VmapLevel | None) -> None:
    """Check that attributes were assigned that every member would assign alike; without a level, that none were."""
    for path, value in assigned.items():
        if isinstance(value, torch.Tensor):
            same = level is not None and not (level.is_stacked(value) or value.requires_grad)
        else:
            same = level is not None and isinstance(value, _PLAIN) and not isinstance(value, PerMember)
        if not same:
            raise CannotFuse(_CHANGES.format(path))


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    plain = [leaf.tensor if isinstance(leaf, Stacked) else leaf for leaf in leaves]
    return [leaf for leaf in plain if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _argument(leaf: Any, level: VmapLevel) -> Any:
    return level.wrap(leaf.tensor) if isinstance(leaf, Stacked) else leaf


def _outputs(output: Any, level: VmapLevel) -> Any:
    if isinstance(output, torch.Tensor):
        return _rows(output, level)
    leaves, structure = opened(output)
    return whole([_rows(leaf, level) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)


def _rows(output: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    if is_sparse(output):
        raise CannotFuse("the model returns a sparse tensor: return it dense")
    return level.rows(output)


def _keep(name: str, new: torch.Tensor | None, stack: torch.Tensor | SharedTensor, level: VmapLevel) -> None:
    """Write a buffer that was assigned anew into the stack."""
    if isinstance(stack, SharedTensor):
        raise ChangesShared(f"the model assigns another tensor to its buffer {name}")
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
