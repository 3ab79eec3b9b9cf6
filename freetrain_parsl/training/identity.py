"""Which code a training runs, so that a checkpoint can tell that it comes from other code."""

from __future__ import annotations

import hashlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def code_identity(function: Callable[..., Any]) -> str:
    """Return ``module:qualname#digest``; the digest changes with the code, not with its comments or its place.

    It is of the bytecode that runs, since the source of a function that travelled may be gone or newer. Functions
    that it calls do not count. Another version of Python gives another digest.

    Parameters
    ----------
    function
        A training function; wrappers made with `functools.wraps` are looked through.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if not isinstance(code, types.CodeType):
        return name
    digest = hashlib.sha256()
    _feed(digest.update, code)
    return f"{name}#{digest.hexdigest()[:16]}"


def _feed(update: Callable[[bytes], None], code: types.CodeType) -> None:
    update(code.co_code)
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        update(repr(names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed(update, constant)
        elif isinstance(constant, frozenset):
            update(repr(sorted(map(repr, constant))).encode())  # its order depends on the process
        else:
            update(repr(constant).encode())
