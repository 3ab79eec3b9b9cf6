"""Checks of a training function's signature."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_signature"]


def check_signature(func: Callable[..., Any]) -> None:
    """Reject a function that cannot be called with a session, or that returns before it has trained.

    Raises
    ------
    InvalidTrainer
        The function has no first parameter for the session, or is a coroutine or generator function.
    """
    signature = inspect.signature(func)
    first = next(iter(signature.parameters.values()), None)
    name = getattr(func, "__name__", repr(func))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if first is None or first.default is not first.empty or first.kind not in (*positional, first.VAR_POSITIONAL):
        inside = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise InvalidTrainer(
            f"training function {name}({inside}) has no parameter for the session: its first parameter is the "
            f"session, without a default value: def {name}({', '.join(filter(None, ['session', inside]))})"
        )
    if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise InvalidTrainer(
            f"training function {name}() is a generator or coroutine function: a call would not train; "
            "write it without yield and async"
        )
