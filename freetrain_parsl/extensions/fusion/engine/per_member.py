"""Numbers and random numbers that each member of an array has for itself."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from freetrain_parsl.errors import CannotFuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager


class RandomStreams(Protocol):
    """The random number generators of the members."""

    def __len__(self) -> int:
        """Return the number of members."""

    @property
    def agree(self) -> bool:
        """Whether the generators of all members are in the same state."""

    def of(self, member: int) -> AbstractContextManager[None]:
        """Make torch's default generators those of a member; their state is kept afterwards."""

    def shared(self) -> AbstractContextManager[None]:
        """Make torch's default generators those of all members, which all advance; only if they agree."""


class PerMember(float):
    """A number that differs between the members, in the place of a module's number.

    It is a float, so that torch accepts it as an argument, but its value is NaN: where it is used as one number by
    mistake, the result is an error or NaN, and never the number of one member.

    Parameters
    ----------
    values
        The number of each member.
    """

    values: tuple[float, ...]

    def __new__(cls, values: Iterable[float]) -> PerMember:  # noqa: D102, PYI034  # typing.Self is new in 3.11
        number = super().__new__(cls, "nan")
        number.values = tuple(values)
        return number

    def _common(self, compare: Callable[[float], bool]) -> bool:
        results = {compare(value) for value in self.values}
        if len(results) > 1:
            raise CannotFuse(f"a comparison with {self} is true for some of the training jobs only")
        return results.pop()

    def __lt__(self, other: float) -> bool:
        return self._common(lambda value: value < other)

    def __le__(self, other: float) -> bool:
        return self._common(lambda value: value <= other)

    def __gt__(self, other: float) -> bool:
        return self._common(lambda value: value > other)

    def __ge__(self, other: float) -> bool:
        return self._common(lambda value: value >= other)

    def __eq__(self, other: object) -> bool:
        return self._common(lambda value: value == other)

    def __ne__(self, other: object) -> bool:
        return self._common(lambda value: value != other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self._common(bool)

    def _refuse(self, *_: Any) -> Any:
        raise CannotFuse(f"one number is needed where the training jobs have {self}")

    __float__ = __int__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = _refuse

    def _each(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, PerMember):
            return PerMember(map(operation, self.values, other.values))
        if isinstance(other, (int, float)):
            return PerMember(operation(value, other) for value in self.values)
        if isinstance(other, torch.Tensor):
            return NotImplemented  # the tensor's own operator
        return self._refuse()

    def __add__(self, other: Any) -> Any:
        return self._each(operator.add, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return self._each(operator.mul, other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Any:
        return self._each(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._each(lambda value, left: left - value, other)

    def __truediv__(self, other: Any) -> Any:
        return self._each(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._each(lambda value, left: left / value, other)

    def __pow__(self, other: Any, modulus: None = None) -> Any:
        return self._each(operator.pow, other)

    def __rpow__(self, other: Any, modulus: None = None) -> Any:
        return self._each(lambda value, left: left**value, other)

    def __neg__(self) -> PerMember:
        return PerMember(-value for value in self.values)

    def __repr__(self) -> str:
        return ", ".join(f"{value:g}" for value in self.values)

    __str__ = __repr__


Differing = dict[str, float | dict[str, float]]
"""Path of an attribute -> the members' numbers, a `PerMember`, or a dictionary in which there are such."""


def of_member(value: Any, member: int) -> Any:
    """Return the number of a member, if `value` differs between members, else `value`."""
    return value.values[member] if isinstance(value, PerMember) else value
