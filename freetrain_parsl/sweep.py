"""The points of a sweep: lists of arguments, expanded to the arguments of one training each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidTrainer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_POINTS", "SweepPoint", "combined", "zipped"]

MOST_POINTS = 10_000
"""More is probably an error in a list."""

_SEEDS = "seeds"
_ONE_VALUE = (str, bytes, bytearray, Mapping)  # iterable, but one argument


@dataclass(frozen=True)
class SweepPoint:
    """The arguments of one training of a sweep.

    Parameters
    ----------
    args, kwargs
        Arguments of its function, without the session.
    seed
        Its seed; ``None``: that of the training app.
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
        Arguments: an iterable has one value for each training, anything else is the same for all of them. Strings,
        bytes and mappings are single values.
    seeds
        The trainings' seeds; ``None``: all have that of the training app.
    caller
        Begins the messages of errors.

    Raises
    ------
    InvalidTrainer
        There is no list, a list is empty, or their lengths differ.
    """
    values = _values_of(args, kwargs, seeds, caller)
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    if len({len(one) for one in lists.values()}) > 1:
        lengths = ", ".join(f"{_label(key)} has {len(one)}" for key, one in lists.items())
        raise InvalidTrainer(
            f"{caller}: the lists must have the same length, but {lengths} values; use .grid() for all combinations"
        )
    points = [dict(zip(lists, point, strict=True)) for point in zip(*lists.values(), strict=True)]
    return [_point({**values, **point}) for point in points]


def combined(
    args: Sequence[Any], kwargs: Mapping[str, Any], seeds: Iterable[int] | None, *, caller: str
) -> list[SweepPoint]:
    """Return one point for each combination of the lists' values; those of the last list vary fastest, seeds last.

    Parameters
    ----------
    args, kwargs, seeds, caller
        See `zipped`.

    Raises
    ------
    InvalidTrainer
        There is no list, a list is empty, or there are too many combinations.
    """
    values = _values_of(args, kwargs, seeds, caller)
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    number = math.prod(len(one) for one in lists.values())
    if number > MOST_POINTS:
        raise InvalidTrainer(f"{caller}: this makes {number:,} trainings, more than {MOST_POINTS:,}; shorten a list")
    points = [dict(zip(lists, point, strict=True)) for point in itertools.product(*lists.values())]
    return [_point({**values, **point}) for point in points]


def _values_of(args: Sequence[Any], kwargs: Mapping[str, Any], seeds: object, caller: str) -> dict[int | str, Any]:
    """Return all arguments by position or name, and the seeds; iterables are lists."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    if seeds is not None:
        if not isinstance(seeds, Iterable) or isinstance(seeds, _ONE_VALUE):
            raise InvalidTrainer(f"{caller}: seeds must be a list of whole numbers, got {seeds!r}")
        given[_SEEDS] = seeds
    values = {key: _expanded(key, value, caller) for key, value in given.items()}
    if not any(isinstance(value, list) for value in values.values()):
        raise InvalidTrainer(f"{caller}: give a list of values for at least one argument, or seeds=range(…)")
    return values


def _expanded(key: int | str, value: Any, caller: str) -> Any:
    """Return an iterable as a list of Python values, anything else as one Python value."""
    if not isinstance(value, Iterable) or isinstance(value, _ONE_VALUE) or getattr(value, "ndim", 1) == 0:
        return _python_value(value)
    values = value.tolist() if hasattr(value, "tolist") else list(itertools.islice(value, MOST_POINTS + 1))
    if not values:
        raise InvalidTrainer(f"{caller}: {_label(key)} is empty; give at least one value")
    if len(values) > MOST_POINTS:
        raise InvalidTrainer(f"{caller}: {_label(key)} has more than {MOST_POINTS:,} values; shorten it")
    return [_python_value(one) for one in values]


def _python_value(value: Any) -> Any:
    """Return a scalar of numpy as a Python number, so that both name the same training."""
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
