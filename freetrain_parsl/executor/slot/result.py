"""Serialization of what a training function returns; errors name the part that cannot be pickled."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from parsl.serialize import deserialize, serialize

from freetrain_parsl.errors import TrainingError
from freetrain_parsl.executor.payloads.packing import first_line, type_name
from freetrain_parsl.executor.payloads.value_files import LARGEST_MESSAGE
from freetrain_parsl.executor.slot.in_time import TooSlow, in_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.protocol.messages import StoredValue

__all__ = ["deposit", "serialize_result", "try_result"]

_DEEPEST: Final = 8
_MOST_PARTS: Final = 10_000  # that are tried
_LONGEST_TRIAL: Final = 30.0  # seconds to unpickle a result, on a node that may be busy


def serialize_result(training: str, value: object) -> bytes:
    """Serialize the return value of a training function.

    Raises
    ------
    TrainingError
        It cannot be pickled; the message names the training, the part and its type.
    """
    try:
        payload = bytes(serialize(value))
    except Exception as error:  # noqa: BLE001 - pickling an object may raise any exception
        where, part, refusal = _culprit(value, error)
        raise TrainingError(
            f"training {training!r} is done, but cannot return its result: {where} is of type {type_name(part)} and "
            f"cannot be pickled ({first_line(refusal)}); return numbers, texts, tensors, and lists or dicts of these"
        ) from None
    try_result(f"training {training!r}", payload)
    return payload


def try_result(who: str, payload: bytes) -> None:
    """Unpickle a result where it harms its own call only: this runs the user's code, which may end the process.

    In the driver, it would end all trainings, or keep the results that follow from their futures. A failure is left to
    the driver, which may have what is missing here. Large results are not tried: they would be in memory twice.

    Raises
    ------
    TrainingError
        It takes too long.
    """
    if len(payload) > LARGEST_MESSAGE:
        return
    too_slow = False
    with suppress(BaseException):
        try:
            in_time(partial(deserialize, payload), _LONGEST_TRIAL)
        except TooSlow:
            too_slow = True
    if too_slow:
        raise TrainingError(
            f"{who} is done, but cannot return its result: to unpickle it takes more than {_LONGEST_TRIAL:.0f} s; "
            "return numbers, texts, tensors, and lists or dicts of these"
        )


def deposit(payload: bytes, files: ValueFiles | None) -> tuple[bytes, StoredValue | None]:
    """Return what to send of a serialized value: itself or, if it is large and there are `files`, that of its file.

    Raises
    ------
    CheckpointError
        The file cannot be written; `StorageUnavailable` if that may be temporary.
    """
    if files is None or len(payload) <= LARGEST_MESSAGE:
        return payload, None
    return b"", files.store(payload)


def _culprit(value: object, error: Exception) -> tuple[str, object, Exception]:
    """Return the innermost part that cannot be pickled, where it is, and why not."""
    where, tried, seen = "the returned value", 0, {id(value)}
    for _ in range(_DEEPEST):
        try:
            parts = list(islice(_parts(value), _MOST_PARTS - tried))
        except Exception:  # noqa: BLE001 - keys and attributes of the user's objects may raise any exception
            break
        for place, part in parts:
            tried += 1
            if id(part) not in seen and (refusal := _refusal(part)) is not None:
                seen.add(id(part))
                where, value, error = f"{where}{place}", part, refusal
                break
        else:
            break
    return where, value, error


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Return what a container or an object consists of."""
    if isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    else:
        attributes: Any = getattr(value, "__dict__", {})
        if not isinstance(value, (type, FunctionType)):
            yield from ((f".{name}", part) for name, part in dict(attributes).items())


def _refusal(value: object) -> Exception | None:
    try:
        serialize(value)
    except Exception as error:  # noqa: BLE001 - pickling an object may raise any exception
        return error
    return None
