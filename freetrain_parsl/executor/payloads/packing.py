"""Serialization of the calls of apps; for training apps, errors name the object that cannot be pickled."""

from __future__ import annotations

import inspect
from functools import partial
from pickle import PicklingError
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from parsl.executors.execute_task import execute_task
from parsl.serialize import pack_apply_message
from parsl.serialize.errors import SerializationError

from freetrain_parsl.errors import InvalidTrainer
from freetrain_parsl.executor.payloads.app_modules import directory_of, search_first
from freetrain_parsl.executor.payloads.payloads import pack_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["execute_from", "first_line", "functions_of", "pack_or_refuse", "pack_task", "type_name"]


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


def functions_of(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions of an app: a bash app is a partial call of a function of Parsl with the user's."""
    function = inspect.unwrap(function)
    parts = (function.func, *function.args) if isinstance(function, partial) else (function,)
    return [inspect.unwrap(part) for part in parts if callable(part)]


def pack_or_refuse(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], imported: set[str] | None = None
) -> bytes:
    """Serialize the call of a training function; see `pack_training`.

    Raises
    ------
    InvalidTrainer
        An argument, a global or a closure variable cannot be pickled; the message names it.
    """
    try:
        return pack_training(function, args, kwargs, imported)
    except Exception as error:  # pickling an object may raise any exception
        name = getattr(function, "__name__", repr(function))
        found = next(_culprits(function, args, kwargs), None)
        if found is None:
            raise InvalidTrainer(
                f"training function {name}() cannot be sent to the nodes: {first_line(error)}"
            ) from error
        what, value, refusal = found
        raise InvalidTrainer(
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
