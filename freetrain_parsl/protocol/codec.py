"""Encoding as JSON: of messages, as frames with an optional payload, and of the planner's events and actions.

A message is a frozen dataclass. The allowed values are derived from the types of its fields, once for each class. A
frame of another version or of an unknown type, or with a field that is missing, unknown or out of range, is rejected
with an error that names the cause. Nothing is unpickled here.

A field's type is its Python type with a `Limit`, which is checked when a message is decoded, so that all other code can
rely on it.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from freetrain_parsl.errors import FreeTrainError
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob, PoolNode, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Decode = Callable[[Any], Any]

__all__ = [
    "VERSION",
    "Count",
    "Duration",
    "Envelope",
    "Integer",
    "Limit",
    "Name",
    "Names",
    "Number",
    "ProtocolError",
    "Text",
    "Time",
    "as_json",
    "by_type",
    "decode",
    "encode",
    "is_name",
    "progress_item",
    "restored",
    "restored_progress",
    "type_name",
]

_T = TypeVar("_T")

_LONGEST_NAME = 1024
_LONGEST_TEXT = 1 << 16
_LARGEST_INTEGER = 1 << 53  # exact in JSON and in SQLite
_MOST_NAMES = 32
_LONGEST_TIME = 1e12  # seconds
_SURROGATE = re.compile("[\ud800-\udfff]")  # alone, it cannot be stored
_AS_THEY_ARE = frozenset((str, int, bool, type(None)))  # types whose values JSON has


@dataclass(frozen=True)
class Limit:
    """A restriction of a type.

    Parameters
    ----------
    accepts
        Returns whether a decoded JSON value is allowed.
    """

    accepts: Callable[[Any], bool]


def is_name(value: Any) -> bool:
    """Return whether a value is safe in logs, in the journal and on a terminal: printable, at most 1024 characters."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and _SURROGATE.search(value) is None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_INTEGER


def _is_time(value: Any) -> bool:
    finite = isinstance(value, float) or _is_integer(value)
    return finite and -_LONGEST_TIME < value < _LONGEST_TIME  # comparisons with NaN are false


def _are_names(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > _MOST_NAMES:
        return False
    return all(map(is_name, value)) and all(map(is_name, value.values()))


Name: TypeAlias = Annotated[str, Limit(is_name)]
"""Printable, at most 1024 characters."""

Text: TypeAlias = Annotated[str, Limit(_is_text)]
"""Any text that can be stored, at most 64 KiB."""

Integer: TypeAlias = Annotated[int, Limit(_is_integer)]
"""Less than 2^53 in magnitude."""

Count: TypeAlias = Annotated[int, Limit(lambda value: _is_integer(value) and value >= 0)]
"""Zero or more."""

Number: TypeAlias = float
"""Any float, including NaN and infinities."""

Time: TypeAlias = Annotated[float, Limit(_is_time)]
"""Seconds; finite."""

Duration: TypeAlias = Annotated[float, Limit(lambda value: _is_time(value) and value >= 0)]
"""Seconds; finite, zero or more."""

Names: TypeAlias = Annotated[dict[str, str], Limit(_are_names)]
"""A mapping from names to names, with at most 32 entries."""


VERSION = 9
"""Protocol version; incremented with every change of a message."""

_LONGEST_HEADER = 1 << 20  # bytes
_PAYLOAD = "payload"  # the field that is sent as a separate frame
_PROGRESS = "trainers_progressed"  # the type of an item that stands for several events
_ENVELOPE = ("v", "type", "n", "seen")


class ProtocolError(FreeTrainError):
    """A frame does not conform to this protocol."""


@dataclass(frozen=True)
class Envelope:
    """A message with the numbers that `freetrain_parsl.protocol.delivery` needs.

    Parameters
    ----------
    message
        The message.
    number
        Its sequence number; ``None``: it is not numbered.
    seen
        Number of the last message that its sender has received; ``None``: not stated.
    """

    message: Any
    number: int | None = None
    seen: int | None = None


def type_name(kind: type) -> str:
    """Return the name of a message class on the wire, ``NodeClosing`` -> ``node_closing``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")


def by_type(*kinds: type[_T]) -> Mapping[str, type[_T]]:
    """Index message classes by their name on the wire."""
    return {type_name(kind): kind for kind in kinds}


def encode(envelope: Envelope) -> list[bytes]:
    """Return the frames of a message."""
    kind: Any = type(envelope.message)
    if not _described(kind)[1]:
        return [_bare(kind, envelope.number, envelope.seen), b""]
    header = _to_json(envelope.message)
    payload = header.pop(_PAYLOAD, b"")
    header["v"] = VERSION
    if envelope.number is not None:
        header["n"] = envelope.number
    if envelope.seen is not None:
        header["seen"] = envelope.seen
    return [json.dumps(header).encode(), payload]


def decode(frames: Sequence[bytes], known: Mapping[str, type]) -> Envelope:
    """Decode the frames of one of the `known` messages, see `by_type`.

    Raises
    ------
    ProtocolError
        The frames are invalid; the error states the cause.
    """
    try:
        head, payload = frames
        header = json.loads(head[:_LONGEST_HEADER])
        envelope = {key: header.pop(key, None) for key in _ENVELOPE}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{len(frames)} frames that are not a message: {str(error)[:200]}") from None
    kind = envelope["type"]
    if envelope["v"] != VERSION:
        raise ProtocolError(f"a message of protocol version {_brief(envelope['v'])}; this is version {VERSION}")
    if not is_name(kind) or kind not in known:
        raise ProtocolError(f"a message of unknown type {_brief(kind)}")
    if _has_payload(known[kind]):
        header[_PAYLOAD] = payload
    try:
        number, seen = (None if (n := envelope[key]) is None else _number(key, n) for key in ("n", "seen"))
        return Envelope(_decoder(known[kind])(header), number, seen)
    except _Refused as refusal:
        raise ProtocolError(f"a {kind!r} message that cannot be used: {refusal}") from None


def as_json(item: ev.Event | ev.Action) -> dict[str, Any]:
    """Return a JSON object with the item's ``type`` and those of its fields that differ from their defaults."""
    converted: dict[str, Any] = _to_json(item)
    return converted


def progress_item(time: float, left: Mapping[str, float]) -> dict[str, Any]:
    """Return a JSON object for a `TrainerProgressed` of each trainer; `restored_progress` reads it."""
    return {"type": _PROGRESS, "time": time, "left": _to_json(left)}


def restored_progress(item: Mapping[str, Any]) -> list[ev.TrainerProgressed]:
    """Return the events that `progress_item` has converted; none if it is another item."""
    if item["type"] != _PROGRESS:
        return []
    return [ev.TrainerProgressed(item["time"], trainer, float(left)) for trainer, left in item["left"].items()]


def restored(item: Mapping[str, Any]) -> Any:
    """Return the event or action that `as_json` has converted.

    Raises
    ------
    KeyError, ValueError
        It is none.
    """
    return _decoder(_PLANNERS[item["type"]])(item)


class _Refused(ValueError):
    """A value that is not allowed for a field; its text names the value."""


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Refused(f"its {name!r} is {_brief(value)}")
    return value


def _to_json(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:  # most values, and what follows is slow
        return value
    if is_dataclass(value):
        message: Any = type(value)
        kind, defaults = _described(message)
        given = ((name, getattr(value, name), default) for name, default in defaults)
        return {"type": kind, **{name: _to_json(content) for name, content, default in given if content != default}}
    if isinstance(value, ScalingCurve):
        return {"points": value.points, "relative": value.relative}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)  # JSON has no infinity
    return value


@lru_cache(maxsize=4096)
def _bare(kind: Any, number: int | None, seen: int | None) -> bytes:
    """Return the header of a message without fields: most messages of a driver are heartbeats."""
    numbers = {name: value for name, value in (("n", number), ("seen", seen)) if value is not None}
    return json.dumps({"type": _described(kind)[0], "v": VERSION, **numbers}).encode()


@cache
def _has_payload(kind: Any) -> bool:
    return _PAYLOAD in {item.name for item in fields(kind)}


@cache
def _described(kind: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the name of a class of messages, and the defaults of its fields."""
    return type_name(kind), [
        (item.name, item.default if item.default_factory is MISSING else item.default_factory())
        for item in fields(kind)
    ]


@cache
def _decoder(hint: Any) -> Decode:
    """Return a function that converts a JSON value to this type, or raises `_Refused`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [limit for limit in hint.__metadata__ if isinstance(limit, Limit)]
        if len(limits) == 1:
            return _checked(_decoder(arguments[0]), limits[0].accepts)
        return _checked(_decoder(arguments[0]), lambda value: all(limit.accepts(value) for limit in limits))
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _checked(_as_it_is, lambda value: isinstance(value, str) and value in arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is frozenset:
        each = _decoder(arguments[0])
        return _checked(lambda value: frozenset(map(each, value)), lambda value: isinstance(value, list))
    if origin in (dict, Mapping):
        key, item = map(_decoder, arguments)
        return _checked(lambda value: {key(k): item(v) for k, v in value.items()}, lambda v: isinstance(v, dict))
    if is_dataclass(hint):
        return _dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = {member.value: member for member in hint}
        return _checked(members.__getitem__, lambda value: isinstance(value, str) and value in members)
    return _SIMPLE.get(hint) or _checked(_as_it_is, lambda _: False)  # such as a function: never in JSON


def _checked(convert: Decode, accepts: Callable[[Any], bool]) -> Decode:
    def decode_value(value: Any) -> Any:
        if not accepts(value):
            raise _Refused(_brief(value))
        return convert(value)

    return decode_value


def _tuple(items: tuple[Any, ...]) -> Decode:
    if len(items) == 2 and items[1] is Ellipsis:
        each = _decoder(items[0])
        return _checked(lambda value: tuple(map(each, value)), lambda value: isinstance(value, list))
    parts = [_decoder(item) for item in items]
    return _checked(
        lambda value: tuple(part(item) for part, item in zip(parts, value, strict=True)),
        lambda value: isinstance(value, list) and len(value) == len(parts),
    )


def _union(options: tuple[Any, ...]) -> Decode:
    """Return the decoder of ``X | None``, or of a union of dataclasses, which the type's name tells apart."""
    others = [option for option in options if option is not type(None)]
    if len(others) > 1:
        decoders = {type_name(option): _decoder(option) for option in others}
        some = _checked(
            lambda value: decoders[value["type"]](value),
            lambda value: isinstance(value, dict) and is_name(value.get("type")) and value["type"] in decoders,
        )
    else:
        some = _decoder(others[0])
    if len(others) == len(options):
        return some
    return lambda value: None if value is None else some(value)


def _dataclass(kind: Any) -> Decode:
    hints = typing.get_type_hints(kind, localns=_FOR_CHECKERS, include_extras=True)
    decoders = {item.name: _decoder(hints[item.name]) for item in fields(kind)}
    required = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    name = type_name(kind)

    def decode_fields(value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type", name) != name:
            raise _Refused(_brief(value))
        given = {key: item for key, item in value.items() if key != "type"}
        if missing := sorted(required - given.keys()):
            raise _Refused(f"it has no {missing[0]!r}")
        if unknown := sorted(given.keys() - decoders.keys()):
            raise _Refused(f"it has an unknown field {_brief(unknown[0])}")
        values = {}
        for key, item in given.items():
            try:
                values[key] = decoders[key](item)
            except _Refused as refusal:  # noqa: PERF203 - names the field
                raise _Refused(f"its {key!r} is {refusal}") from None
        try:
            return kind(**values)
        except FreeTrainError as error:
            raise _Refused(str(error)) from None

    return decode_fields


def _as_it_is(value: Any) -> Any:
    return value


_duration = next(limit for limit in Duration.__metadata__ if isinstance(limit, Limit))  # type: ignore[attr-defined]

_NOT_FINITE = ("inf", "-inf", "nan")
_FOR_CHECKERS = {
    "Mapping": Mapping,
    "PoolNode": PoolNode,
    "ScalingCurve": ScalingCurve,
    "PlannedJob": PlannedJob,
    "Window": Window,
}
"""Names in annotations that their modules import for type checkers only."""

_SIMPLE: dict[Any, Decode] = {
    bool: _checked(_as_it_is, lambda value: isinstance(value, bool)),
    int: _checked(_as_it_is, lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: _checked(float, lambda value: isinstance(value, float) or _is_integer(value) or value in _NOT_FINITE),
    str: _checked(_as_it_is, lambda value: isinstance(value, str)),
    bytes: _checked(_as_it_is, lambda value: isinstance(value, bytes)),
    timedelta: _checked(lambda value: timedelta(seconds=value), _duration.accepts),
    Path: _checked(Path, lambda value: isinstance(value, str)),
    ScalingCurve: _checked(
        lambda value: ScalingCurve(value["points"], relative=value["relative"]),
        lambda value: isinstance(value, dict) and value.keys() == {"points", "relative"},
    ),
}


def _brief(value: Any, length: int = 80) -> str:
    """Return a short one-line representation of a value of any size."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:length])
    return f"a {type(value).__name__}"


_PLANNERS: Mapping[str, Any] = by_type(
    *ev.Event.__subclasses__(), *ev.Reassign.__subclasses__(), ev.Lend, ev.RequestBlock, ev.QueueBlock, ev.ReleaseBlock
)
