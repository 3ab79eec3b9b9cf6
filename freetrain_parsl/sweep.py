"""The points of a sweep: lists of arguments, expanded to the arguments of one training job each."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidApp, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import TypeGuard

__all__ = [
    "MOST_POINTS",
    "NameTemplate",
    "SweepPoint",
    "check_template",
    "combined",
    "fill_template",
    "is_template",
    "zipped",
]

MOST_POINTS = 10_000
"""More points are probably an error in a list."""

_SEEDS = "seeds"
_ONE_VALUE = (str, bytes, bytearray, Mapping)  # iterable, but one argument


@dataclass(frozen=True)
class SweepPoint:
    """The arguments of one training job of a sweep.

    Parameters
    ----------
    args, kwargs
        Arguments of its function, without the session.
    seed
        Its seed; ``None``: the training app's.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


def zipped(
    args: Sequence[Any], kwargs: Mapping[str, Any], seeds: Iterable[int] | None, *, caller: str
) -> list[SweepPoint]:
    """Return one point for each position of the lists, which have the same length.

    Parameters
    ----------
    args, kwargs
        Arguments: an iterable has one value for each training job, anything else is the same for all of them. Strings,
        bytes and mappings are single values.
    seeds
        The training jobs' seeds; ``None``: the training app's for all.
    caller
        Begins the messages of errors.

    Raises
    ------
    InvalidApp
        There is no list, a list is empty, or their lengths differ.
    """
    values = _values_of(args, kwargs, seeds, caller)
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    if len({len(one) for one in lists.values()}) > 1:
        lengths = ", ".join(f"{_label(key)} has {len(one)}" for key, one in lists.items())
        raise InvalidApp(
            f"{caller}: the lists must have the same length, but {lengths} values; use .grid() for all combinations"
        )
    points = [dict(zip(lists, point, strict=True)) for point in zip(*lists.values(), strict=True)]
    return [_point({**values, **point}) for point in points]


def combined(
    args: Sequence[Any], kwargs: Mapping[str, Any], seeds: Iterable[int] | None, *, caller: str
) -> list[SweepPoint]:
    """Return one point for each combination of the lists' values; the last list's vary fastest, seeds last.

    Parameters
    ----------
    args, kwargs, seeds, caller
        See `zipped`.

    Raises
    ------
    InvalidApp
        There is no list, a list is empty, or there are too many combinations.
    """
    values = _values_of(args, kwargs, seeds, caller)
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    number = math.prod(len(one) for one in lists.values())
    if number > MOST_POINTS:
        raise InvalidApp(f"{caller}: this makes {number:,} training jobs, more than {MOST_POINTS:,}; shorten a list")
    points = [dict(zip(lists, point, strict=True)) for point in itertools.product(*lists.values())]
    return [_point({**values, **point}) for point in points]


def _values_of(args: Sequence[Any], kwargs: Mapping[str, Any], seeds: object, caller: str) -> dict[int | str, Any]:
    """Return all arguments by position or name, and the seeds; iterables are lists."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    if seeds is not None:
        if not isinstance(seeds, Iterable) or isinstance(seeds, _ONE_VALUE):
            raise InvalidApp(f"{caller}: seeds must be a list of whole numbers, got {seeds!r}")
        given[_SEEDS] = seeds
    values = {key: _expanded(key, value, caller) for key, value in given.items()}
    if not any(isinstance(value, list) for value in values.values()):
        raise InvalidApp(f"{caller}: give a list of values for at least one argument, or seeds=range(…)")
    return values


def _expanded(key: int | str, value: Any, caller: str) -> Any:
    """Return an iterable as a list of Python values, anything else as one Python value."""
    if not isinstance(value, Iterable) or isinstance(value, _ONE_VALUE) or getattr(value, "ndim", 1) == 0:
        return _python_value(value)
    values = value.tolist() if hasattr(value, "tolist") else list(itertools.islice(value, MOST_POINTS + 1))
    if not values:
        raise InvalidApp(f"{caller}: {_label(key)} is empty; give at least one value")
    if len(values) > MOST_POINTS:
        raise InvalidApp(f"{caller}: {_label(key)} has more than {MOST_POINTS:,} values; shorten it")
    return [_python_value(one) for one in values]


def _python_value(value: Any) -> Any:
    """Return a scalar of numpy as a Python number, so that both name the same training job."""
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def _label(key: int | str) -> str:
    return f"argument {key + 1}" if isinstance(key, int) else key


def _point(values: Mapping[int | str, Any]) -> SweepPoint:
    return SweepPoint(
        args=tuple(value for key, value in values.items() if isinstance(key, int)),
        kwargs={key: value for key, value in values.items() if isinstance(key, str) and key != _SEEDS},
        seed=values.get(_SEEDS),
    )


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
        for _, key, spec, conversion in self._parts:
            if key is not None and (key not in known or conversion or not _FORMAT.fullmatch(spec or "")):
                raise self._refusal()

    def fill(self, values: Mapping[str, object]) -> str:
        """Substitute values; characters not allowed in a name become ``_``.

        Raises
        ------
        InvalidInput
            A value cannot be formatted as specified.
        """
        name = ""
        for literal, key, spec, _ in self._parts:
            name += literal
            if key is None:
                continue
            try:
                name += format(values[key], spec or "")
            except (ValueError, TypeError, OverflowError):
                raise InvalidInput(
                    f"{self._template!r}: {str(values[key])[:80]!r} cannot be formatted with {spec!r}"
                ) from None
        return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:_LONGEST_NAME]

    def _refusal(self) -> InvalidInput:
        known = ", ".join(f"{{{value}}}" for value in self._known)
        return InvalidInput(
            f"{self._template[:_LONGEST_NAME]!r} cannot be filled; a name may use {known}, "
            "optionally with a plain format such as ':.2f'"
        )


def is_template(name: object) -> TypeGuard[str]:
    """Return whether a training job's name is a template: braces are not allowed in a name."""
    return isinstance(name, str) and ("{" in name or "}" in name)


def check_template(function: Callable[..., Any], template: str) -> None:
    """Reject a template that no call of a training function can fill.

    Raises
    ------
    InvalidApp
        It has other fields than the function's parameters and ``{seed}``, or is not a template.
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
    InvalidApp
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
        raise InvalidApp(f"{function.__name__}: name {error}") from None


def _template(function: Callable[..., Any], template: str, known: Collection[str]) -> NameTemplate:
    try:
        return NameTemplate(template, known)
    except InvalidInput as error:
        raise InvalidApp(f"{function.__name__}: name {error}") from None
