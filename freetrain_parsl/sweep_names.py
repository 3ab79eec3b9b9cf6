"""Names of trainings, made from a template such as ``lr{lr:.0e}-{repeat}``."""

from __future__ import annotations

import inspect
import re
import string
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput, InvalidTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import TypeGuard

__all__ = ["NameTemplate", "check_template", "fill_template", "is_template"]

_LONGEST_NAME = 128
_LONGEST_TEMPLATE = 1000
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Alignment, sign, width and precision of at most two digits, type: no attribute access, no large output.
_FORMAT = re.compile(r"(?:[<>=^])?[-+ ]?0?[0-9]{0,2}(?:\.[0-9]{1,2})?[a-zA-Z%]?")


class NameTemplate:
    """A template with ``{value}`` or ``{value:format}`` fields. Unlike `str.format`, it allows no attribute access.

    Parameters
    ----------
    template
        The template; ``{{`` and ``}}`` are literal braces.
    known
        The allowed fields.

    Raises
    ------
    InvalidInput
        The template is invalid.
    """

    def __init__(self, template: str, known: Collection[str]) -> None:
        self._template = template
        self._known = known
        if len(template) > _LONGEST_TEMPLATE:
            raise InvalidInput(f"a name may have up to {_LONGEST_NAME} characters, got {len(template)}")
        try:
            self._parts = list(string.Formatter().parse(template))
        except ValueError:
            raise self._refusal() from None
        for _, field, spec, conversion in self._parts:
            if field is not None and (field not in known or conversion or not _FORMAT.fullmatch(spec or "")):
                raise self._refusal()

    def fill(self, values: Mapping[str, object]) -> str:
        """Substitute values; characters not allowed in a name become ``_``.

        Raises
        ------
        InvalidInput
            A value cannot be formatted as specified.
        """
        name = ""
        for literal, field, spec, _ in self._parts:
            name += literal
            if field is None:
                continue
            try:
                name += format(values[field], spec or "")
            except (ValueError, TypeError, OverflowError):
                raise InvalidInput(
                    f"{self._template!r}: {str(values[field])[:80]!r} cannot be formatted with {spec!r}"
                ) from None
        return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:_LONGEST_NAME]

    def _refusal(self) -> InvalidInput:
        known = ", ".join(f"{{{value}}}" for value in self._known)
        return InvalidInput(
            f"{self._template[:_LONGEST_NAME]!r} cannot be filled; a name may use {known}, "
            "optionally with a plain format such as ':.2f'"
        )


def is_template(name: object) -> TypeGuard[str]:
    """Return whether a training's name is a template: braces are not allowed in a name."""
    return isinstance(name, str) and ("{" in name or "}" in name)


def check_template(function: Callable[..., Any], template: str) -> None:
    """Reject a template that no call of a training function can fill.

    Raises
    ------
    InvalidTrainer
        It has other fields than the function's parameters and ``{seed}``, or is no template.
    """
    _, *parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        single = [parameter.name for parameter in parameters if parameter.kind not in _SEVERAL]
        _template(function, template, [*single, "seed"])


def fill_template(
    function: Callable[..., Any], template: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, seed: int
) -> str:
    """Fill a template with the arguments of a call, including defaults, and the seed.

    Raises
    ------
    InvalidTrainer
        An argument is missing, or cannot be formatted as specified.
    """
    signature = inspect.signature(function)
    bound = signature.bind_partial(None, *args, **kwargs)
    bound.apply_defaults()
    _, *parameters = signature.parameters.values()
    single = [parameter.name for parameter in parameters if parameter.kind not in _SEVERAL]
    values = {"seed": seed, **{name: bound.arguments[name] for name in single if name in bound.arguments}, **kwargs}
    filled = _template(function, template, values)
    try:
        return filled.fill(values)
    except InvalidInput as error:
        raise InvalidTrainer(f"{function.__name__}: name {error}") from None


def _template(function: Callable[..., Any], template: str, known: Collection[str]) -> NameTemplate:
    try:
        return NameTemplate(template, known)
    except InvalidInput as error:
        raise InvalidTrainer(f"{function.__name__}: name {error}") from None
