"""Calls of a prepared model: their `forward` is replaced while the model is fused, without a change of the object.

The class is patched while any of its objects is intercepted, so the objects keep their class, can be pickled and
copied, and have the same state; a copy is not intercepted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["intercept", "original_forward"]

_handlers: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
_originals: dict[type, Any] = {}


def intercept(model: nn.Module, handler: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Callable[[], None]:
    """Call ``handler(args, kwargs)`` instead of the model's `forward`.

    Returns
    -------
    release
        Ends it, and restores the class if no other object of it is intercepted.
    """
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


def original_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the model's own `forward`, as a function of the model and the arguments."""
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    function: Callable[..., Any] = _originals.get(owner, vars(owner)["forward"])
    return function


def _intercepted(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get(self)
        return original(self, *args, **kwargs) if handler is None else handler(args, kwargs)

    return forward
