"""Checks of a training function's signature."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidApp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["bind_call", "check_session", "check_signature"]


def bind_call(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a call of a training function, excluding the session.

    Raises
    ------
    TypeError
        The function does not accept them.
    """
    session, *others = signature.parameters.values()
    if session.name in kwargs and session.kind is session.POSITIONAL_OR_KEYWORD:
        raise TypeError(f"{name}(): the argument {session.name!r} is the session, which is not passed")
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        taken = ", ".join(str(parameter) for parameter in others) or "none"
        raise TypeError(f"{name}(): {error}; the arguments after the session are: {taken}") from None


def check_signature(func: Callable[..., Any]) -> None:
    """Reject a function that cannot be called with a session, or that returns before it has trained.

    Raises
    ------
    InvalidApp
        The function has no first parameter for the session, or is a coroutine or generator function.
    """
    name = getattr(func, "__name__", repr(func))
    check_session(name, inspect.signature(func))
    if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise InvalidApp(
            f"training function {name}() is a generator or coroutine function: a call would not train; "
            "write it without yield and async"
        )


def check_session(name: str, signature: inspect.Signature) -> None:
    """Reject a function, by its signature, that cannot be called with a session.

    Raises
    ------
    InvalidApp
        It has no first parameter for the session.
    """
    first = next(iter(signature.parameters.values()), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if first is None or first.default is not first.empty or first.kind not in (*positional, first.VAR_POSITIONAL):
        inside = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise InvalidApp(
            f"training function {name}({inside}) has no parameter for the session: its first parameter is the "
            f"session, without a default value: def {name}({', '.join(filter(None, ['session', inside]))})"
        )
