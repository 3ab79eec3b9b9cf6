"""The planner's events and actions as JSON objects, for the journal, and back without loss."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PoolNode, Trainer, Window
from freetrain_parsl.protocol.codec import by_type, type_name

__all__ = ["as_json", "restored"]

_KINDS = by_type(*ev.Event.__subclasses__(), *ev.Reassign.__subclasses__(), ev.Lend, ev.RequestBlock, ev.ReleaseBlock)
_TYPES = {"Mapping": Mapping, "PoolNode": PoolNode, "ScalingCurve": ScalingCurve, "Trainer": Trainer, "Window": Window}
"""Names in annotations that their modules import for type checkers only."""


def as_json(item: ev.Event | ev.Action) -> dict[str, Any]:
    """Return a JSON object with the item's ``type`` and those of its fields that differ from their defaults."""
    return {"type": type_name(type(item)), **_fields(item)}


def restored(item: Mapping[str, Any]) -> Any:
    """Return the event or action that `as_json` has converted.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is none.
    """
    values = dict(item)
    return _restore(_KINDS[values.pop("type")], values)


def _fields(value: Any) -> dict[str, Any]:
    items = ((item, getattr(value, item.name)) for item in fields(value))
    return {item.name: _to_json(content) for item, content in items if content != _default(item)}


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _to_json(value: Any) -> Any:
    if isinstance(value, ScalingCurve):
        return {"points": value.points, "relative": value.relative}
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, localns=_TYPES)


def _restore(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # X | None
        return None if value is None else _restore(arguments[0], value)
    if origin in (tuple, frozenset):
        return origin(_restore(arguments[0], item) for item in value)
    if origin is Mapping:
        return {key: _restore(arguments[1], item) for key, item in value.items()}
    if hint is ScalingCurve:
        return ScalingCurve(value["points"], relative=value["relative"])
    if is_dataclass(hint):
        hints = _hints(typing.cast("type", hint))
        return hint(**{key: _restore(hints[key], item) for key, item in value.items()})  # type: ignore[operator]
    return hint(value)
