"""What differs between the models of several training jobs: only numbers may, everything else must be equal."""

from __future__ import annotations

import enum
import functools
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.memory import MemoryLayout
from freetrain_parsl.extensions.fusion.engine.per_member import Differing, PerMember
from freetrain_parsl.extensions.fusion.forward.adapters import (
    free_attributes,
    is_scale,
    per_member_scales,
    rank_dimensions,
    shape_without,
    without_ranks,
)
from freetrain_parsl.extensions.fusion.forward.sparse import is_sparse, same_sparse
from freetrain_parsl.training.step.bypass import BypassCheck

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_BY_VALUE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype, enum.Enum),
)
_BY_IDENTITY = (types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType)
_TENSORS = ("_parameters", "_buffers", "_modules")  # compared as tensors and modules
_HOOKS_WITHOUT_EFFECT = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_OF_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # numbered over all modules
_DETAILS_OF_CLASSES = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"),
    *("__abstractmethods__", "_abc_impl", "__annotations__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__", "__parameters__", "__orig_bases__"),
}


class KeptBySome(CannotFuse):
    """Some models have a tensor where others have None: perhaps one that they keep from their calls so far."""


def compare(models: Sequence[nn.Module], ignored: Collection[str] = ()) -> Differing:
    """Compare the models of several training jobs.

    Parameters
    ----------
    models
        One per training job.
    ignored
        Attributes of the models themselves that are not compared.

    Returns
    -------
    dict of str to PerMember
        Path of an attribute -> the numbers of the training jobs, for dropout probabilities that differ; for scales of
        LoRA layers, a dictionary of such numbers.

    Raises
    ------
    CannotFuse
        If the models differ in anything else, or have attributes that cannot be compared.
    """
    if _has_any_global_hook():  # type: ignore[no-untyped-call]  # torch's own
        raise CannotFuse("there is a hook of all modules")
    parts = [dict(model.named_modules()) for model in models]
    first = parts[0]
    for other in parts[1:]:
        _equal("modules", [list(first), list(other)])
    comparisons = [_Comparison(models[0], model) for model in models]
    for path, module in first.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotFuse(f"{path or 'the model'} is compiled by torch.jit")
        kinds = [type(each[path]) for each in parts]
        try:
            same = all(comparison.equal(kinds[0], kind) for comparison, kind in zip(comparisons, kinds, strict=True))
        except _Incomparable as error:
            raise CannotFuse(f"the class of {path or 'the model'} cannot be compared: {error}") from None
        if not same:
            names = ", ".join(kind.__name__ for kind in kinds)
            raise CannotFuse(f"{path or 'the model'} is of a different class in each of the training jobs: {names}")
    _compare_tensors(models)
    differing: Differing = {}
    free = free_attributes(models[0])
    for path in first:
        attributes = [_attributes(each[path], () if path else ignored) for each in parts]
        _equal(f"{path or 'the model'}: attributes", [sorted(each) for each in attributes])
        for name in attributes[0]:
            full = f"{path}.{name}".lstrip(".")
            values = [each[name] for each in attributes]
            if name in free.get(path, ()):
                continue
            numbers = _numbers(first[path], name, values)
            if numbers is None:
                _compare_values(full, [without_ranks(value) for value in values], comparisons)
            elif repr(numbers) != repr(values[0]):
                differing[full] = numbers
    return differing


def _numbers(module: nn.Module, name: str, values: list[Any]) -> float | dict[str, float] | None:
    """Return the numbers of an attribute that may differ; ``None``: it may not."""
    if is_scale(module, name):
        return per_member_scales(values)
    if _may_differ(module, name) and all(type(value) in (int, float) for value in values):
        return PerMember(values) if len(set(values)) > 1 else values[0]
    return None


def traits(model: nn.Module) -> list[object]:
    """Return what must be equal in all models of an array, as far as it has a text that is the same in all processes.

    Models whose traits differ are refused by `compare`. What has no such text, as an object of an unknown class, has
    the same trait as any other.
    """
    free = free_attributes(model)
    return [(path, _trait(type(part)), _traits_of(part, free.get(path, set()))) for path, part in model.named_modules()]


def _traits_of(module: nn.Module, free: Collection[str]) -> list[tuple[str, object]]:
    names = sorted(
        name
        for name in _attributes(module, free)
        if not (_may_differ(module, name) or is_scale(module, name) or name.endswith(_OF_HOOKS))
    )
    return [(name, _trait(without_ranks(vars(module)[name]))) for name in names]


def _trait(value: Any, within: tuple[int, ...] = ()) -> object:
    if isinstance(value, _BY_VALUE):
        return repr(value)
    if id(value) in within:
        return "…"
    within = (*within, id(value))
    if isinstance(value, (type, types.FunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}, {value.dtype}"
    if isinstance(value, (tuple, list)):
        return [_trait(item, within) for item in value]
    if isinstance(value, dict):
        return sorted((repr(_trait(key)), repr(_trait(item, within))) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_trait(item, within)) for item in value)
    if not _in_python(value) or isinstance(value, nn.Module):
        return _trait(type(value))
    # Private attributes may be of this process, as the hash that a configuration of transformers keeps.
    public = {name: attribute for name, attribute in vars(value).items() if not name.startswith("_")}
    return [_trait(type(value)), _trait(public, within)]


def _equal(what: str, values: Sequence[list[Any]]) -> None:
    for value in values[1:]:
        if value != values[0]:
            extra = [item for item in [*values[0], *value] if (item in values[0]) != (item in value)]
            raise CannotFuse(f"{what} differ between the training jobs: {', '.join(map(str, extra)) or 'their order'}")


def _compare_values(path: str, values: list[Any], comparisons: list[_Comparison]) -> None:
    try:
        equal = [comparison.equal(values[0], value) for comparison, value in zip(comparisons, values, strict=True)]
    except _Incomparable as error:
        raise CannotFuse(f"{path} cannot be compared between the training jobs: {error}") from None
    if not all(equal):
        kept = [value for value in values if value is not None]
        some = len(kept) < len(values) and all(isinstance(value, torch.Tensor) for value in kept)
        kind = KeptBySome if some else CannotFuse
        raise kind(f"{path} differs between the training jobs: {', '.join(map(_brief, values))}")


def _brief(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 40 else text[:39] + "…"  # the message is one line


def _may_differ(module: nn.Module, name: str) -> bool:
    """Return whether a number is a dropout probability: operators get the numbers of all members then."""
    return "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))


def _attributes(module: nn.Module, ignored: Collection[str]) -> dict[str, Any]:
    left_out = {*_TENSORS, *_HOOKS_WITHOUT_EFFECT, *ignored}
    if isinstance(module, nn.RNNBase):  # other references to its parameters
        left_out |= {"_flat_weights", "_flat_weight_refs"}
    attributes = {name: value for name, value in vars(module).items() if name not in left_out}
    for name, value in attributes.items():  # hooks are numbered over all modules: only their order counts
        if name.endswith(_OF_HOOKS) and hasattr(value, "values"):
            attributes[name] = list(value.values())
    return attributes


def _compare_tensors(models: Sequence[nn.Module]) -> None:
    described = [_described(model) for model in models]
    for other in described[1:]:
        _equal("parameters and buffers", [list(described[0]), list(other)])
    for name in described[0]:
        descriptions = [each[name] for each in described]
        if any(description != descriptions[0] for description in descriptions[1:]):
            raise CannotFuse(f"{name} differs between the training jobs: {'; '.join(descriptions)}")
    owned = [{id(parameter) for parameter in model.parameters() if parameter.requires_grad} for model in models]
    if len(set().union(*owned)) < sum(map(len, owned)):
        raise CannotFuse("training jobs share a parameter that they all train")


def _described(model: nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter or buffer, what must be equal; a tied one is the other's name."""
    names: dict[int, str] = {}
    described = {}
    ranks = rank_dimensions([model])
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if id(tensor) in names:
            described[name] = f"the same as {names[id(tensor)]}"
            continue
        names[id(tensor)] = name
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
            raise CannotFuse(f"{name} is a {type(tensor).__name__} ({tensor.layout})")
        accumulated = (tensor._post_accumulate_grad_hooks or {}).values()
        if tensor._backward_hooks or not all(map(BypassCheck.is_own_hook, accumulated)):
            raise CannotFuse(f"{name} has a hook on its gradient")
        trained = "trained" if tensor.requires_grad else "not trained"
        layout = MemoryLayout(tensor)
        memory = "" if layout.is_plain else f", in memory with the dimensions {layout.order}"
        shape = shape_without(tensor.shape, ranks.get(id(tensor)))
        described[name] = f"{shape}, {tensor.dtype}, {tensor.device}, {trained}{memory}"
    return described


class _Incomparable(Exception):
    """A value that has no meaning of equality; the message describes it."""


class _Comparison:
    """Comparison of values of two models.

    Parameters
    ----------
    one, other
        The models.
    """

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self._paths = [_paths(one), _paths(other)]
        self._under_way: set[tuple[int, int]] = set()

    def equal(self, one: Any, other: Any) -> bool:
        """Return whether two values are equal; a cycle of references is if everything else in it is."""
        pair = id(one), id(other)
        if pair in self._under_way:
            return True
        self._under_way.add(pair)
        try:
            return self._equal(one, other)
        finally:
            self._under_way.discard(pair)

    def _equal(self, one: Any, other: Any) -> bool:  # noqa: C901  # one line for each kind of value
        if type(one) is not type(other) and not self.equal(type(one), type(other)):
            return False
        if isinstance(one, (nn.Module, torch.Tensor)):
            return self._equal_parts(one, other)
        if isinstance(one, RemovableHandle):  # of a hook, which is compared where it acts
            return True
        if isinstance(one, _BY_VALUE):
            return bool(one == other) or (one != one and other != other)  # NaN
        if isinstance(one, type):
            return one is other or self._equal_classes(one, other)
        if isinstance(one, types.FunctionType):
            return self._equal_functions(one, other)
        if isinstance(one, _BY_IDENTITY):
            return one is other or self._equal_bound(one, other)
        if isinstance(one, types.MethodType):
            return self.equal(one.__func__, other.__func__) and self.equal(one.__self__, other.__self__)
        if isinstance(one, functools.partial):
            parts = [(value.func, value.args, value.keywords) for value in (one, other)]
            return self.equal(*parts)
        if isinstance(one, (tuple, list)):
            return len(one) == len(other) and all(map(self.equal, one, other))
        if isinstance(one, dict):
            return self._equal_mappings(one, other)
        if isinstance(one, (set, frozenset)):
            return all(isinstance(item, _BY_VALUE) for item in one | other) and bool(one == other)
        if isinstance(one, np.ndarray) and one.dtype != object:
            return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        return self._equal_objects(one, other)

    def _equal_mappings(self, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
        return one.keys() == other.keys() and all(self.equal(value, other[key]) for key, value in one.items())

    def _equal_parts(self, one: Any, other: Any) -> bool:
        """Compare a module or tensor: one of the model by its path, another tensor by value."""
        paths = [paths.get(id(value)) for paths, value in zip(self._paths, (one, other), strict=True)]
        if isinstance(one, torch.Tensor):
            if paths != [None, None]:
                raise _Incomparable(f"it refers to the parameter or buffer {paths[0] or paths[1]}")
            if one.requires_grad or other.requires_grad:
                raise _Incomparable("it is a tensor with a gradient, but no parameter")
            alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
            if is_sparse(one) or is_sparse(other):
                return same_sparse(one, other)
            return alike and torch.equal(one, other)
        if None in paths:
            raise _Incomparable(f"a {type(one).__name__} that is no submodule")
        return paths[0] == paths[1]

    def _equal_classes(self, one: type, other: type) -> bool:
        """Compare classes: each training job may have defined its own from the same code."""
        if (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__):
            return False
        own = [
            {key: value for key, value in vars(kind).items() if key not in _DETAILS_OF_CLASSES} for kind in (one, other)
        ]
        return self.equal(one.__bases__, other.__bases__) and self._equal_mappings(*own)

    def _equal_functions(self, one: types.FunctionType, other: types.FunctionType) -> bool:
        if one is other and not one.__closure__:
            return True
        parts = [(f.__defaults__, f.__kwdefaults__) for f in (one, other)]
        if one.__code__ != other.__code__ or one.__globals__ is not other.__globals__ or not self.equal(*parts):
            return False
        cells = [f.__closure__ or () for f in (one, other)]
        return all(map(self._equal_cells, *cells))

    def _equal_cells(self, one: types.CellType, other: types.CellType) -> bool:
        if one is other:
            return True
        contents = one.cell_contents, other.cell_contents
        if isinstance(contents[0], (list, dict, set)) and contents[0] is not contents[1]:
            raise _Incomparable("a function that uses a list or dict of its training job")
        return self.equal(*contents)

    def _equal_bound(self, one: Any, other: Any) -> bool:
        owners = getattr(one, "__self__", None), getattr(other, "__self__", None)
        return one.__name__ == other.__name__ and None not in owners and self.equal(*owners)

    def _equal_objects(self, one: Any, other: Any) -> bool:
        """Compare objects of classes in Python, such as configurations, by their attributes."""
        if isinstance(one, (staticmethod, classmethod)):
            return self.equal(one.__func__, other.__func__)
        if isinstance(one, property):
            parts = [(value.fget, value.fset, value.fdel) for value in (one, other)]
            return self.equal(*parts)
        if not _in_python(one):
            if one is other:
                return True
            raise _Incomparable(f"it is a {type(one).__name__}")
        return self._equal_mappings(vars(one), vars(other))


_HEAP_TYPE = 1 << 9  # flag of classes that are not defined in C, with few exceptions


def _in_python(value: Any) -> bool:
    """Return whether an object is nothing but its attributes."""
    kinds = type(value).__mro__[:-1]
    in_python = all(kind.__flags__ & _HEAP_TYPE and "__slots__" not in vars(kind) for kind in kinds)
    return hasattr(value, "__dict__") and (in_python or isinstance(value, types.SimpleNamespace))


def _paths(model: nn.Module) -> dict[int, str]:
    """Return identity -> path of all modules, parameters and buffers."""
    return {
        id(part): path for path, part in [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    }
