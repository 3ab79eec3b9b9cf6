"""Serialization of code and values between driver and slots: the payloads of messages, and the calls of apps."""

from __future__ import annotations

import dis
import inspect
import io
import logging
import sys
import threading
from concurrent.futures import InvalidStateError
from contextlib import contextmanager
from pickle import PicklingError
from pickle import _Pickler as StockPickler  # dill's pickler is a subclass of it
from types import CellType, CodeType, FunctionType, ModuleType
from typing import IO, TYPE_CHECKING, Any

import dill
import dill.detect
from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.execute_task import execute_task
from parsl.serialize import deserialize, pack_apply_message
from parsl.serialize.concretes import DillSerializer
from parsl.serialize.errors import DeserializationError, SerializationError

from freetrain_parsl.errors import CheckpointError, InvalidApp, TrainingError
from freetrain_parsl.executor.payloads.app_modules import (
    directory_of,
    functions_of,
    imported_in,
    own_modules,
    search_first,
)
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.protocol.messages import StoredValue

logger = logging.getLogger(__name__)

__all__ = [
    "error_in",
    "execute_from",
    "first_line",
    "pack_or_refuse",
    "pack_task",
    "pack_training",
    "settle_with_error",
    "settle_with_value",
    "type_name",
    "unpack_training",
]


class _Pickler(dill.Pickler):  # type: ignore[misc]  # untyped
    """dill's pickler, but importable objects go by reference even if their module is no attribute of its package.

    dill copies such classes, e.g. ``torch.optim.SGD``; the copy is then not a subclass of ``torch.optim.Optimizer``.
    """

    imported: set[str]

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:  # noqa: FBT001, FBT002 - pickle's signature
        if isinstance(obj, (type, FunctionType)) and id(obj) not in self.memo and _can_be_imported(obj):
            self.imported.add(obj.__module__)
            StockPickler.save_global(self, obj)  # type: ignore[attr-defined]  # not in typeshed
            return
        if isinstance(obj, ModuleType):
            self.imported.add(obj.__name__)
        elif isinstance(obj, CodeType):
            self.imported.update(imported_in(obj))
        super().save(obj, save_persistent_id)


def _can_be_imported(thing: type | FunctionType) -> bool:
    found: Any = sys.modules.get(thing.__module__ or "")
    if found is None or thing.__module__ == "__main__":
        return False
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


class _Directory:
    """Becomes a call of `search_first`, before what follows it in a payload is imported."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return search_first, (self._path,)


def pack_training(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], imported: set[str] | None = None
) -> bytes:
    """Serialize a call of a training function.

    Unlike Parsl's serialization, this includes the globals that the function uses: a script or notebook may define its
    network and data next to the function. Objects from importable modules go by reference; they are looked up in the
    directory of the function's module first. `imported` receives the names of modules that are imported where the call
    is deserialized, or by functions in it.
    """
    directory = directory_of(function)
    buffer = io.BytesIO()
    with own_modules(directory), _only_its_globals():
        pickler = _Pickler(buffer, recurse=True)
        pickler.imported = set() if imported is None else imported
        pickler.dump((_Directory(directory), function, args, kwargs))
    return buffer.getvalue()


_search = threading.RLock()  # what is pickled may pickle something itself


@contextmanager
def _only_its_globals() -> Iterator[None]:
    """Let dill take the globals that a function refers to itself.

    It also looks for those of the functions that this one calls, although they go by reference, or are pickled with
    their own; and it does not end where these call each other, as behind torch's ``fully_shard``.
    """
    with _search:
        search, dill.detect.globalvars = dill.detect.globalvars, _globals_of
        try:
            yield
        finally:
            dill.detect.globalvars = search


def _globals_of(function: FunctionType, recurse: bool, builtin: bool) -> dict[str, Any]:  # noqa: ARG001, FBT001 - dill's signature
    scope = function.__globals__
    return {name: scope[name] for name in sorted(set(_globals_in(function.__code__))) if name in scope}


def _globals_in(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if "_GLOBAL" in each.opname)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def unpack_training(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function, its arguments and its keyword arguments; from now on, its directory is searched first."""
    _, function, args, kwargs = dill.loads(payload)  # noqa: S301 - from the driver, over the authenticated channel
    return function, args, kwargs


def settle_with_value(future: Future[Any], sent: bytes | StoredValue, files: ValueFiles | None = None) -> None:
    """Set a future's result to a value sent by a slot, or its exception if the value cannot be deserialized here.

    The value was sent serialized, or as what identifies its file. It is discarded if the future is done.
    """
    if future.done():
        if files is not None and not isinstance(sent, bytes):
            files.discard(sent)
        return
    try:
        if isinstance(sent, bytes):
            value = deserialize(sent)
        else:
            assert files is not None, "slots without a directory for values store none"
            with files.take(sent) as file:
                value = _deserialize_file(file)
    except CheckpointError as error:  # the file cannot be read
        settle_with_error(future, error)
    except BaseException as error:  # noqa: BLE001 - unpickling runs the value's own code, which may call sys.exit
        settle_with_error(future, DeserializationError(f"the result cannot be deserialized here: {_described(error)}"))
    else:
        _settle(future, lambda: future.set_result(value))


def _deserialize_file(file: IO[bytes]) -> Any:
    """Deserialize a value from a file: without copies of all of it, while which no other thread of the driver runs."""
    header = file.readline()
    if header.removesuffix(b"\n") == DillSerializer.identifier:
        return dill.load(file)  # noqa: S301 - as was announced over the authenticated channel
    return deserialize(header + file.read())


def settle_with_error(future: Future[Any], error: BaseException) -> None:
    """Set a future's exception, unless the future is done."""
    _settle(future, lambda: future.set_exception(error))


def _settle(future: Future[Any], set_outcome: Callable[[], None]) -> None:
    if future.done():
        return
    try:
        set_outcome()
    except InvalidStateError:
        logger.debug("a future was cancelled, or failed by another thread, meanwhile")
    except BaseException:
        # Other than exceptions, concurrent.futures passes on what callbacks raise: sys.exit would end this thread.
        logger.exception("a callback of a future failed")


def error_in(payload: bytes) -> BaseException:
    """Return the exception sent by a slot, with its remote traceback."""
    try:
        wrapped = deserialize(payload)
        error = wrapped.get_exception() if isinstance(wrapped, RemoteExceptionWrapper) else TrainingError(repr(wrapped))
    except BaseException as failure:  # noqa: BLE001 - unpickling runs the exception's own code, as above
        return DeserializationError(
            f"the call failed, but its exception cannot be deserialized here: {_described(failure)}"
        )
    try:
        repr(error)  # in Parsl, this fails in a callback, and the app's future is never done
    except BaseException:  # noqa: BLE001 - of the user's class
        return TrainingError(f"the call raised {_described(error)}").with_traceback(error.__traceback__)
    return error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def pack_task(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Serialize the call of an ordinary app, as Parsl's own executors do, and the directory of its modules.

    Raises
    ------
    SerializationError
        An argument cannot be pickled.
    """
    try:
        call = bytes(pack_apply_message(function, args, kwargs, buffer_threshold=1 << 20))
    except (TypeError, PicklingError) as error:
        raise SerializationError(getattr(function, "__name__", repr(function))) from error
    directory = next(filter(None, map(directory_of, functions_of(function))), "")
    return call if not directory else bytes(pack_apply_message(execute_from, (directory, call), {}))


def execute_from(directory: str, call: bytes) -> Any:
    """Carry out a serialized call on a node, whose modules are looked up first where the driver has found them."""
    search_first(directory)
    return execute_task(call)


def pack_or_refuse(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], imported: set[str] | None = None
) -> bytes:
    """Serialize the call of a training function; see `pack_training`.

    Raises
    ------
    InvalidApp
        An argument, a global or a closure variable cannot be pickled; the message names it.
    """
    try:
        return pack_training(function, args, kwargs, imported)
    except Exception as error:  # pickling an object may raise any exception
        name = getattr(function, "__name__", repr(function))
        found = next(_culprits(function, args, kwargs), None)
        if found is None:
            raise InvalidApp(f"training function {name}() cannot be sent to the nodes: {first_line(error)}") from error
        what, value, refusal = found
        raise InvalidApp(
            f"training function {name}() cannot be sent to the nodes: {what} is of type {type_name(value)} and "
            f"cannot be pickled ({first_line(refusal)}); create it inside the function, or in a module that the "
            "nodes can import"
        ) from error


def _culprits(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any, BaseException]]:
    for number, value in enumerate(args, start=1):
        if (error := _refusal(value)) is not None:
            yield f"argument {number}", value, error
    for key, value in kwargs.items():
        if (error := _refusal(value)) is not None:
            yield f"argument {key!r}", value, error
    yield from _inside(function, set())


def _inside(thing: Any, seen: set[int]) -> Iterator[tuple[str, Any, BaseException]]:
    """Search the objects that a function, or the methods of a class, refer to; inner functions and classes first."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, type):
        for member in vars(thing).values():
            plain = getattr(member, "__func__", member)
            if isinstance(plain, FunctionType):
                yield from _inside(plain, seen)
    if not isinstance(thing, FunctionType):
        return
    for kind, name, value in _references(thing):
        if (error := _refusal(value)) is None:
            continue
        if isinstance(value, (FunctionType, type)):
            yield from _inside(value, seen)
        else:
            yield f"{kind} {name!r}, used in {thing.__qualname__}(),", value, error


def _references(function: FunctionType) -> Iterator[tuple[str, str, Any]]:
    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        if parameter.default is not parameter.empty:
            yield "the default of parameter", parameter.name, parameter.default
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # an empty cell: its variable was never assigned
            yield "the variable", name, cell.cell_contents
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield "the global", name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _refusal(value: Any) -> BaseException | None:
    try:
        pack_training(value, (), {})
    except Exception as error:  # noqa: BLE001 - pickling an object may raise any exception
        return error
    return None


def type_name(value: Any) -> str:
    """Return the name of a value's class, with its module unless it is built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text; its class if it has none."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - of the user's class, which may raise any exception
        lines = []
    return (lines or [type(error).__name__])[0]
