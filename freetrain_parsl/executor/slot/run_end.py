"""How a run ends: by what its function returns, or by an exception."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from itertools import islice
from textwrap import shorten
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import deserialize, serialize

from freetrain_parsl.errors import PeerFailed, StorageUnavailable, TrainingError, UsageError
from freetrain_parsl.executor.payloads.app_modules import WHERE_MODULES_ARE
from freetrain_parsl.executor.payloads.payloads import first_line, type_name
from freetrain_parsl.executor.payloads.value_files import LARGEST_MESSAGE
from freetrain_parsl.protocol.reports import PeersFailed, RunFailed, StorageFailed
from freetrain_parsl.texts import cut, storable, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.protocol.messages import StoredValue
    from freetrain_parsl.protocol.reports import RunEnd

__all__ = [
    "TooSlow",
    "deposit",
    "end_by",
    "in_time",
    "print_exception",
    "serialize_result",
    "serialized_exception",
    "try_result",
    "write_error",
]

_T = TypeVar("_T")


_LONGEST_REASON = 500  # characters
_LONGEST_TEXT = 5.0  # seconds for the texts of an exception
_LARGEST_EXCEPTION = 4 << 20  # bytes; a larger one would hold up the heartbeats of all slots in the driver
_LONGEST_STAND_IN = 10_000  # characters; with the reason, fewer than `text_of` leaves as they are
_LONGEST_PRINTED = 1 << 20  # characters of a traceback
_DEEPEST: Final = 8
_MOST_PARTS: Final = 10_000  # that are tried
_LONGEST_TRIAL: Final = 30.0  # seconds to unpickle a result, on a node that may be busy


class TooSlow(Exception):
    """The user's code takes too long."""


def in_time(make: Callable[[], _T], seconds: float) -> _T:
    """Return what the user's code makes in another thread, which nothing can end; while it lasts, heartbeats continue.

    Raises
    ------
    TooSlow
        It takes more than `seconds`.
    """
    made: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, name="freetrain-in-time", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the user's code has started as many as there may be
        return make()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not made:
        raise TooSlow
    return made[0]


def end_by(error: BaseException, generation: int = 0) -> tuple[RunEnd, bytes]:
    """Return the end of a training job whose function, or session, has raised an exception, with its payload.

    An exception whose text takes more than seconds is passed on without it.
    """
    try:
        return in_time(partial(_end_by, error, generation), _LONGEST_TEXT)
    except TooSlow:
        stand_in = _without_text(error)
        return RunFailed(str(stand_in)), _serialized_plainly(stand_in)


def _end_by(error: BaseException, generation: int) -> tuple[RunEnd, bytes]:
    match error:
        case PeerFailed():
            return PeersFailed(generation, text_of(error), error.unreachable, error.step), b""
        case StorageUnavailable():  # not the training job's fault: it waits
            return StorageFailed(text_of(error), storable(error.condition)), b""
        case SystemExit():
            # Not passed on as it is: it would end the driver's program, too.
            usage = UsageError(f"the training function called sys.exit({error.code!r}); return from it instead")
            error = usage.with_traceback(error.__traceback__)
        case BaseException() if not isinstance(error, Exception):  # asyncio.CancelledError, …: the same
            raised = TrainingError(f"the training function raised {type(error).__name__}: {text_of(error)}")
            error = raised.with_traceback(error.__traceback__)
        case ModuleNotFoundError() if type(error) is ModuleNotFoundError:
            # Typically the driver found it by a sys.path that the script has changed, which nothing says on a node.
            missing = ModuleNotFoundError(f"{text_of(error)}; {WHERE_MODULES_ARE}", name=error.name, path=error.path)
            error = missing.with_traceback(error.__traceback__)
    reason = shorten(f"{type(error).__name__}: {text_of(error)}", _LONGEST_REASON)
    return RunFailed(reason), _serialized(error)


def serialized_exception(error: BaseException) -> bytes:
    """Serialize an exception, with its traceback; in place of one that cannot be passed on, a `RuntimeError`.

    That includes one whose text or representation takes more than seconds: it would hold up the driver.
    """
    try:
        return in_time(partial(_serialized, error), _LONGEST_TEXT)
    except TooSlow:
        return _serialized_plainly(_without_text(error))


def _without_text(error: BaseException) -> RuntimeError:
    text = f"{type(error).__name__}: its text takes more than {_LONGEST_TEXT:.0f} s, and was left out"
    return RuntimeError(text).with_traceback(error.__traceback__)


def _serialized_plainly(error: RuntimeError) -> bytes:
    """Serialize an exception of ours, with its traceback if possible."""
    with suppress(Exception):  # dill imports the modules of a traceback, and may open no more files
        payload = bytes(serialize(RemoteExceptionWrapper(RuntimeError, error, error.__traceback__)))
        if len(payload) <= _LARGEST_EXCEPTION:
            return payload
    return bytes(serialize(RemoteExceptionWrapper(RuntimeError, error, None)))


def _serialized(error: BaseException) -> bytes:
    if not isinstance(error, Exception):  # sys.exit in the user's function would end the driver, too
        raised = TrainingError(f"the app raised {type(error).__name__}: {text_of(error)}")
        error = raised.with_traceback(error.__traceback__)
    kind, traceback = type(error), error.__traceback__
    try:
        # Not pickled to be measured: meanwhile no other thread of the process runs, and none sends heartbeats.
        texts = sum(len(part) for part in error.args if isinstance(part, (str, bytes, bytearray)))
        payload = (
            b"" if texts > _LARGEST_EXCEPTION else bytes(serialize(RemoteExceptionWrapper(kind, error, traceback)))
        )
        if (size := max(texts, len(payload))) > _LARGEST_EXCEPTION:
            why = f"the exception itself has at least {size:,} bytes, and was not passed on: that is too large"
        else:
            copy = deserialize(payload)  # an exception whose class has other parameters than its `args` fails only here
            with suppress(BaseException):  # the driver replaces such an exception
                str(copy.e_value), repr(copy.e_value)  # as the driver will: if they last, it answers no slot meanwhile
            return payload
    except BaseException as refusal:  # noqa: BLE001 - pickling an object may raise anything
        why = f"the exception itself cannot be pickled: {text_of(refusal, _LONGEST_REASON)}"
    stand_in = RuntimeError(f"{kind.__name__}: {text_of(error, _LONGEST_STAND_IN)} ({why})")
    return _serialized_plainly(stand_in.with_traceback(traceback))


def _formatted(error: BaseException) -> str:
    return "".join(cut(part, _LONGEST_PRINTED // 8) for part in traceback.format_exception(error))


def print_exception(error: BaseException) -> None:
    """Print an exception with its traceback on the standard error output, which the user's code may have closed.

    The middle of what is very long is left out.
    """
    try:
        text = in_time(partial(_formatted, error), _LONGEST_TEXT)
    except TooSlow:
        text = "".join([*traceback.format_tb(error.__traceback__), f"{_without_text(error)}\n"])
    except Exception as failure:  # noqa: BLE001 - a chain of causes may be too deep, its texts may raise anything
        text = f"{type(error).__name__}: {text_of(error)} (no traceback: {type(failure).__name__})\n"
    write_error(cut(text, _LONGEST_PRINTED))


def write_error(text: str) -> None:
    """Print on the standard error output, which the user's code may have closed."""
    try:
        sys.stderr.write(text)
    except (OSError, ValueError, AttributeError):  # a full disk; closed, or removed
        with suppress(OSError):  # the same for the descriptor
            os.write(2, text.encode(errors="backslashreplace"))


def serialize_result(training: str, value: object) -> bytes:
    """Serialize the return value of a training function.

    Raises
    ------
    TrainingError
        It cannot be pickled; the message names the training job, the part and its type.
    """
    try:
        payload = bytes(serialize(value))
    except Exception as error:  # noqa: BLE001 - pickling an object may raise any exception
        where, part, refusal = _culprit(value, error)
        raise TrainingError(
            f"training job {training!r} is done, but cannot return its result: {where} is of type {type_name(part)} "
            "and "
            f"cannot be pickled ({first_line(refusal)}); return numbers, texts, tensors, and lists or dicts of these"
        ) from None
    try_result(f"training job {training!r}", payload)
    return payload


def try_result(who: str, payload: bytes) -> None:
    """Unpickle a result where it harms its own call only: this runs the user's code, which may end the process.

    In the driver, it would end all training jobs, or keep the results that follow from their futures. A failure is left
    to the driver, which may have what is missing here. Large results are not tried: they would be in memory twice.

    Raises
    ------
    TrainingError
        It takes more than `seconds`.
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
