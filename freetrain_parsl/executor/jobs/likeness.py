"""Finds training jobs that are equally fast on the same nodes: the same code with equal shapes."""

from __future__ import annotations

import inspect
from enum import Enum
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol.options import digest_of
from freetrain_parsl.storage.measurements import measurement_path, read_measurement, read_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from freetrain_parsl.executor.jobs.request import Training
    from freetrain_parsl.protocol.options import Code

__all__ = ["SHARDED", "likeness_of", "recall_rates"]

SHARDED: Final = "sharded-counts"
"""What is kept of sharded training jobs: the numbers of units that their models allow."""

_MOST_ITEMS = 64  # of a container whose items count
_MOST_PARTS = 10_000  # of an argument; more are compared by type
_DEEPEST = 8
_COMPARED_BY_TEXT = ("torch.dtype", "torch.device")


def likeness_of(function: Callable[..., Any], code: Code, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a digest that is equal for calls of the same code whose arguments give equal shapes.

    Numbers with a fraction, such as learning rates, count by type only, and tensors and arrays by shape and type. Whole
    numbers and texts count by value: they may be widths, batch sizes or names of models. Functions and classes count by
    name, and other objects, such as configurations, by their attributes.

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
    return digest_of([code.identity, *(f"{name}={_Description(value)}" for name, value in arguments)])


def recall_rates(training: Training, root: Path, slots_per_node: int, units_per_node: int, threads: int | None) -> None:
    """Give a training job what an earlier one has learned that is alike, on slots of the same size, and the same units.

    These are its rates and, if its model is sharded, the numbers of units that the model allows.
    """
    if likeness := training.request.likeness:
        units = [str(units_per_node)] if units_per_node > 1 else []
        training.curve_key = digest_of([likeness, str(slots_per_node), str(threads), *units])
        training.rates = read_rates(root, training.curve_key)
        path = measurement_path(root, SHARDED, training.curve_key)
        training.sharded_on = read_measurement(path, _counts, "it is learned anew")


def _counts(content: Any) -> AllowedCounts:
    multiple, divisor = content
    if type(multiple) is not int or type(divisor) is not int:
        raise TypeError("these are no numbers of nodes")
    try:
        return AllowedCounts(multiple, divisor)
    except InvalidApp as error:
        raise ValueError(str(error)) from None


class _Description:
    """Describes an argument by what its shapes may depend on. Arguments may be large, cyclic, or raise exceptions."""

    def __init__(self, value: Any) -> None:
        self._left = _MOST_PARTS
        self._text = self._of(value, 0)

    def __str__(self) -> str:
        return self._text

    def _of(self, value: Any, depth: int) -> str:
        label = f"{type(value).__module__}.{type(value).__qualname__}"
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            return label
        try:
            return f"{label} {self._content(value, label, depth + 1)}"
        except Exception:  # noqa: BLE001 - attributes and `repr` of the user's objects may raise any exception
            return label

    def _content(self, value: Any, label: str, depth: int) -> str:
        match value:
            case Enum():
                return f"{value.name}"
            case None | str() | bytes() | range() | PurePath():
                return repr(value)
            case Integral():
                return hex(int(value))  # of any length
            case type() | FunctionType() | BuiltinFunctionType():
                return f"{value.__module__}.{value.__qualname__}"
            case partial():
                return self._items([value.func, value.args, value.keywords], depth)
            case list() | tuple():
                return self._items(value, depth)
            case dict():
                return self._items(value.items(), depth)
            case set() | frozenset():
                return str(sorted(self._of(item, depth) for item in islice(value, _MOST_PARTS)))
        if label in _COMPARED_BY_TEXT:
            return str(value)
        if (shape := getattr(value, "shape", None)) is not None:
            return f"{shape} {getattr(value, 'dtype', '')}"
        return self._items(getattr(value, "__dict__", {}).items(), depth)

    def _items(self, items: Collection[Any], depth: int) -> str:
        return f"{len(items)} {[self._of(item, depth) for item in islice(items, _MOST_ITEMS)]}"
