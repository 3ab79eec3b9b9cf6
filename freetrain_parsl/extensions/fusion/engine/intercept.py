"""Calls of a prepared model: their `forward` is replaced while the model is fused, without a change of the object.

The class is patched while any of its objects is intercepted, so the objects keep their class, can be pickled and
copied, and have the same state; a copy is not intercepted. Assigned attributes and changed hooks are noted likewise: an
array was compared before.
"""

from __future__ import annotations

import enum
import functools
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["AttributeWatch", "intercept", "original_forward"]

_handlers: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
_originals: dict[type, Any] = {}
_PLAIN = (bool, int, float, str, type(None))
_UNCHANGING = (
    *(*_PLAIN, complex, bytes, range, slice, type(Ellipsis), enum.Enum, torch.dtype, torch.device, torch.layout, type),
    *(torch.Tensor, nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, RemovableHandle),
)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_MISSING = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CHANGES = ("__delattr__", "add_module", "register_buffer", "register_parameter")  # beside assignments


def intercept(model: nn.Module, handler: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Callable[[], None]:
    """Call ``handler(args, kwargs)`` instead of the model's `forward`.

    It is not compiled in a compiled model: `torch.compile` would follow it into the array, and other members that run
    before it returns would be compiled line by line.

    Returns
    -------
    release
        Ends it, and restores the class if no other object of it is intercepted.
    """
    if "forward" in vars(model):
        return _intercept_own(model, handler)
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    if owner not in _originals:
        _originals[owner] = vars(owner)["forward"]
        owner.forward = _intercepted(_originals[owner])  # type: ignore[attr-defined]  # it is in vars(owner)
    _handlers[model] = handler

    def release() -> None:
        _handlers.pop(model, None)
        if owner in _originals and not any(isinstance(other, owner) for other in _handlers):
            owner.forward = _originals.pop(owner)  # type: ignore[attr-defined]  # the same

    return release


class _OwnForward:
    """In the place of a `forward` that was assigned to a model, as TRL and accelerate do.

    Parameters
    ----------
    model
        The model; in a copy, the copy, which is not intercepted.
    original
        What was assigned.
    """

    def __init__(self, model: nn.Module, original: Callable[..., Any]) -> None:
        self.model = model
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get(self.model)
        return self.original(*args, **kwargs) if handler is None else _handled(handler, args, kwargs)

    def of_model(self, _model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call what was assigned, which knows its model."""
        return self.original(*args, **kwargs)


def _intercept_own(model: nn.Module, handler: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Callable[[], None]:
    attributes = vars(model)  # to assign here is no change of the model for `AttributeWatch`
    own = attributes["forward"] = _OwnForward(model, attributes["forward"])
    _handlers[model] = handler

    def release() -> None:
        _handlers.pop(model, None)
        if attributes.get("forward") is own:
            attributes["forward"] = own.original

    return release


def original_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the model's own `forward`, as a function of the model and the arguments."""
    own = vars(model).get("forward")
    if isinstance(own, _OwnForward):
        return own.of_model
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    function: Callable[..., Any] = _originals.get(owner, vars(owner)["forward"])
    return function


def _intercepted(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get(self)
        return original(self, *args, **kwargs) if handler is None else _handled(handler, args, kwargs)

    return forward


@_disable_dynamo  # unlike `torch.compiler.disable`, it does not import the compiler
def _handled(handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return handler(args, kwargs)


class AttributeWatch:
    """Notes changes of attributes of the watched modules, submodules and train or eval mode included.

    Assignments of an equal number or text are no change: loops may call ``model.train()`` in each step.
    """

    def __init__(self) -> None:
        self.changed = False
        """Whether an attribute has changed since this was set to False."""
        self._modules: set[int] = set()
        # Number of hooks that were ever registered, when it was last looked for them; none after one was removed.
        self._hooks: int | None = None
        self._hooks_of_modules: list[tuple[int, ...]] = []
        self._pauses = 0
        self._has_mutable = False  # whether a module keeps lists and the like, which can change without an assignment

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Watch these modules and their submodules from now on, and no others."""
        self._modules = {id(part) for module in modules for part in module.modules()}
        self.changed = False
        self._hooks, self._hooks_of_modules = RemovableHandle.next_id, _numbers_of_hooks(modules)
        self._has_mutable = any(_has_mutable_attributes(part) for module in modules for part in module.modules())

    def begin_epoch(self) -> None:
        """Note a change if the watched modules have mutable attributes: loops may change them between epochs."""
        self.changed = self.changed or self._has_mutable

    def look_for_hooks(self, modules: Sequence[nn.Module]) -> None:
        """Note if the watched modules, which are given, or their parameters have got or lost hooks."""
        if RemovableHandle.next_id != self._hooks:  # else no hook of any kind was registered or removed
            before = self._hooks_of_modules
            self._hooks, self._hooks_of_modules = RemovableHandle.next_id, _numbers_of_hooks(modules)
            self.changed = self.changed or before != self._hooks_of_modules

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch in this context; it replaces methods of ``nn.Module``, and ``RemovableHandle.remove``."""
        original, remove_hook = nn.Module.__setattr__, RemovableHandle.remove
        changes = {name: vars(nn.Module)[name] for name in _CHANGES}

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if self._watches(module) and _differs(vars(module).get(name, _MISSING), value):
                self.changed = True
            original(module, name, value)

        def noted(method: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(method)
            def change(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                self.changed = self.changed or self._watches(module)
                method(module, *args, **kwargs)

            return change

        def remove(handle: RemovableHandle) -> None:
            self._hooks = None
            remove_hook(handle)

        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
        RemovableHandle.remove = remove  # type: ignore[method-assign, assignment]
        for name, method in changes.items():
            setattr(nn.Module, name, noted(method))
        try:
            yield
        finally:
            for name, method in changes.items():
                setattr(nn.Module, name, method)
            nn.Module.__setattr__ = original  # type: ignore[method-assign]
            RemovableHandle.remove = remove_hook  # type: ignore[method-assign]

    def _watches(self, module: nn.Module) -> bool:
        return id(module) in self._modules and not self._pauses

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch in this context: the assignments are the array's own."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1


def _differs(one: object, other: object) -> bool:
    return one is not other and not (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _has_mutable_attributes(module: nn.Module) -> bool:
    """Return whether a module has an attribute that can change without an assignment to the module."""
    of_torch = type(module).__module__.startswith("torch.nn.")  # whose private lists do not change
    return any(
        name not in _OF_EACH_MODULE and not (of_torch and name.startswith("_")) and _is_mutable(value)
        for name, value in vars(module).items()
    )


def _is_mutable(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_mutable, value))
    return not isinstance(value, _UNCHANGING)


def _numbers_of_hooks(modules: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    numbers: list[tuple[int, ...]] = [(int(bool(_has_any_global_hook())),)]  # type: ignore[no-untyped-call]  # torch's own
    for module in modules:
        numbers += [tuple(vars(part)[name]) for part in module.modules() for name in _HOOKS]
        for parameter in module.parameters():
            numbers += [tuple(parameter._backward_hooks or ()), tuple(parameter._post_accumulate_grad_hooks or ())]
    return numbers
