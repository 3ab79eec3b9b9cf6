"""A level of `torch.vmap`: inside, a tensor can stand for one row per member, and code for one member works on all.

`torch.vmap` decides by itself how an operator works on stacks. To decide otherwise, operators need the stack behind
such a tensor, which torch offers only in its private module `torch._C._functorch`. This is the only module that uses
it. A torch without these functions gets a slower level that is made of documented functions only: a
`torch.autograd.Function` whose `vmap` method torch calls with the stacks.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

try:
    from torch._C import _functorch as _private
    from torch._functorch import vmap as _private_vmap
except ImportError:  # a future torch
    _private = None  # type: ignore[assignment]

_NEEDED = (
    "_add_batch_dim",
    "_set_vmap_fallback_enabled",
    "_is_vmap_fallback_enabled",
    "_unwrap_batched",
    "_vmap_decrement_nesting",
    "_vmap_increment_nesting",
    "maybe_current_level",
    "pop_dynamic_layer_stack",
    "push_dynamic_layer_stack",
)

Result = TypeVar("Result")


class VmapLevel(ABC):
    """A level of `torch.vmap` over the members.

    Inside, operators that draw random numbers raise an error unless they run within `suspended`, so that no member
    silently gets the random numbers of another.

    Parameters
    ----------
    size
        How many members there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function inside the level. It must not return or keep stacked tensors."""

    @abstractmethod
    def wrap(self, stack: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        """Return the tensor that has, for member `i`, index `i` of a dimension of `stack`."""

    @abstractmethod
    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Return the plain tensor behind a tensor, and its dimension of members if they can differ."""

    def is_stacked(self, value: object) -> bool:
        """Return whether a value is a tensor that can differ between members."""
        return isinstance(value, torch.Tensor) and self.unwrap(value)[1] is not None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the plain stack of its rows; what is the same for all members is expanded."""
        stack, dimension = self.unwrap(tensor)
        if dimension is None:
            return stack.expand(self.size, *stack.shape)
        return stack if dimension == 0 else stack.movedim(dimension, 0)

    @abstractmethod
    def is_innermost(self) -> bool:
        """Return whether no other transform of `torch.func` runs inside this level."""

    @abstractmethod
    def suspended(self) -> AbstractContextManager[None]:
        """Leave the level for a while: operators on plain tensors are faster."""

    @abstractmethod
    def draw(self, function: Callable[[], Result]) -> Result:
        """Call a function on plain tensors that may draw random numbers."""


class _Suspension:
    """Takes the innermost level from torch's stack of levels, once however deeply it is entered."""

    def __init__(self) -> None:
        self._depth = 0
        self._layer: Any = None

    def __enter__(self) -> None:
        if self._depth == 0:
            self._layer = _private.pop_dynamic_layer_stack()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            _private.push_dynamic_layer_stack(self._layer)
            self._layer = None


class _PrivateLevel(VmapLevel):
    """A level that is held open; needs torch's private functions."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._level = 0
        self._suspension = _Suspension()

    def run(self, function: Callable[[], Result]) -> Result:
        _private_vmap.lazy_load_decompositions()  # type: ignore[attr-defined]
        fallback = _private._is_vmap_fallback_enabled()  # type: ignore[attr-defined]
        # Torch's own fallback is a loop over the rows, too, but it warns, and knows nothing of random numbers.
        _private._set_vmap_fallback_enabled(False)  # type: ignore[attr-defined]  # noqa: FBT003
        self._level = _private._vmap_increment_nesting(self.size, "error")
        try:
            return function()
        finally:
            _private._vmap_decrement_nesting()
            _private._set_vmap_fallback_enabled(fallback)  # type: ignore[attr-defined]

    def wrap(self, stack: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        return _private._add_batch_dim(stack, dimension, self._level)

    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return _private._unwrap_batched(tensor, self._level)

    def is_innermost(self) -> bool:
        return _private.maybe_current_level() == self._level

    def suspended(self) -> AbstractContextManager[None]:
        return self._suspension

    def draw(self, function: Callable[[], Result]) -> Result:
        with self.suspended():
            return function()


class _Bridge(torch.autograd.Function):
    """Calls a function with the stacks behind tensors of a `torch.vmap`."""

    @staticmethod
    def forward(_function: Any, *_tensors: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the last tensor is always stacked")

    @staticmethod
    def setup_context(_ctx: Any, _inputs: Any, _output: Any) -> None:
        """Save nothing: autograd records what the function does with the stacks."""

    @staticmethod
    def vmap(_info: Any, in_dims: tuple[Any, ...], function: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
        return cast("tuple[torch.Tensor, int]", function(in_dims[1:], tensors))


class _PublicLevel(VmapLevel):
    """A level of documented functions; each access to a stack is a custom operator."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._stacked: torch.Tensor | None = None  # any stacked tensor: makes torch call the bridge's `vmap`

    def run(self, function: Callable[[], Result]) -> Result:
        results: list[Result] = []

        def call(stacked: torch.Tensor) -> torch.Tensor:
            self._stacked = stacked
            try:
                results.append(function())
            finally:
                self._stacked = None
            return stacked

        with warnings.catch_warnings():  # of operators that torch does row by row
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            torch.vmap(call, randomness="error")(torch.zeros(self.size))
        return results[0]

    def _bridge(self, function: Callable[[Any, Any], tuple[torch.Tensor, int]], *tensors: torch.Tensor) -> Any:
        return _Bridge.apply(function, *tensors, self._stacked)  # type: ignore[no-untyped-call]

    def wrap(self, stack: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        return cast("torch.Tensor", self._bridge(lambda _dimensions, _stacks: (stack, dimension)))

    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        found: list[tuple[torch.Tensor, int | None]] = []

        def note(dimensions: Any, stacks: Any) -> tuple[torch.Tensor, int]:
            found.append((stacks[0], dimensions[0]))
            return stacks[-1], 0

        self._bridge(note, tensor)
        return found[0]

    def is_innermost(self) -> bool:
        """Return True: there is no documented way to know, and verification notices what does not work."""
        return True

    def suspended(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def draw(self, function: Callable[[], Result]) -> Result:
        results: list[Result] = []

        def call(_dimensions: Any, stacks: Any) -> tuple[torch.Tensor, int]:
            results.append(function())
            return stacks[-1], 0

        self._bridge(call)
        return results[0]


def new_level(size: int) -> VmapLevel:
    """Return a level over `size` members, the fastest that this torch allows."""
    complete = all(hasattr(_private, name) for name in _NEEDED)
    return _PrivateLevel(size) if complete else _PublicLevel(size)
