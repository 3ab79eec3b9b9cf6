"""Suggests to check a training function, once for each code that never was checked."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.storage.checked_code import take_unchecked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.protocol.options import Code

__all__ = ["check_suggestion"]


def check_suggestion(functions: Sequence[tuple[Callable[..., Any], Code | None]]) -> str:
    """Return a line that suggests to check functions, which may run on several nodes or be interrupted.

    It is empty if all were checked, or if a check was suggested before.
    """
    codes = {code.digest: function for function, code in functions if code is not None}
    new = take_unchecked({code.digest: code.name for _, code in functions if code is not None})
    if not new:
        return ""
    commands = [f"freetrain check {_reference(codes[digest])}" for digest in new]
    more = f" (and {len(commands) - 1} more)" if len(commands) > 1 else ""
    return f"never checked whether it survives being moved: {commands[0]}{more}"


def _reference(function: Callable[..., Any]) -> str:
    """Return how ``freetrain check`` names a function."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    name = getattr(function, "__name__", "FUNCTION")
    if code is None:
        return f"FILE.py:{name}"
    file = os.path.relpath(code.co_filename)
    return f"{file if len(file) < len(code.co_filename) else Path(code.co_filename)}:{name}"
