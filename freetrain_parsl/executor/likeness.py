"""Which trainings are alike, so that one is as fast as the other: those of the same code with equal shapes."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from freetrain_parsl.protocol.options import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.protocol.options import Code

__all__ = ["likeness_of"]

_MOST_ITEMS = 64  # of a container whose items count


def likeness_of(function: Callable[..., Any], code: Code, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a digest that is equal for calls of the same code whose arguments give equal shapes.

    Numbers with a fraction, such as learning rates, count by type only, and tensors and arrays by shape and type. Whole
    numbers and texts count by value: they may be widths, batch sizes or names of models.

    Parameters
    ----------
    function
        The training function.
    code
        Its code.
    args, kwargs
        The arguments after the session, which the function accepts.
    """
    bound = inspect.signature(function).bind(None, *args, **kwargs)
    bound.apply_defaults()
    _session, *arguments = bound.arguments.items()
    return digest_of([code.identity, *(f"{name}={_shape(value)}" for name, value in arguments)])


def _shape(value: Any) -> str:
    label = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Enum):
        return str(value)
    if value is None or isinstance(value, (bool, int, str, PurePath)):
        return f"{label} {value!r}"
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        return f"{label} {[_shape(item) for item in value]}"
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return f"{label} {[(_shape(key), _shape(item)) for key, item in value.items()]}"
    if (shape := getattr(value, "shape", None)) is not None:
        return f"{label} {shape} {getattr(value, 'dtype', '')}"
    return label
