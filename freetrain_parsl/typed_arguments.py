"""One line for an argument of a wrong type, in place of typeguard's description of the annotation."""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, ParamSpec

import typeguard

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["wrong_types_refused"]

_Arguments = ParamSpec("_Arguments")
_LONGEST = 100  # characters of a value


def wrong_types_refused(init: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Raise `InvalidSettings` in one line where an ``__init__`` under ``typeguard.typechecked`` refuses an argument."""
    signature = inspect.signature(init)
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def refusing(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            init(*args, **kwargs)
        except typeguard.TypeCheckError as error:
            named = re.match(r'argument "(\w+)"', str(error))
            given = signature.bind(*args, **kwargs).arguments
            if named is None or named[1] not in given:
                raise  # of a constructor that is called by this one
            value, wanted = given[named[1]], signature.parameters[named[1]].annotation
            setting = f"{owner}: {named[1]}"
            if wanted == "timedelta":
                check_duration(setting, value)
            shown = repr(value)
            shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
            raise InvalidSettings(f"{setting} must be {wanted}, got {shown}") from None

    refusing.__signature__ = signature  # type: ignore[attr-defined]  # Parsl's representations do not unwrap
    return refusing
