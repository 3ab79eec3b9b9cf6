"""Applications of an `autograd.Function`: modes of torch do not see them, and most cannot run under `torch.vmap`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from freetrain_parsl.errors import CannotFuse

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FunctionCall", "functions_as_operators"]


class FunctionCall:
    """The application of an `autograd.Function`, as an operator.

    Parameters
    ----------
    kind
        The subclass of `torch.autograd.Function`.
    apply
        Its ``apply``.
    """

    def __init__(self, kind: type[Function], apply: Any) -> None:
        self.__name__ = kind.__name__
        self._kind = kind
        self._apply = apply

    @property
    def knows_vmap(self) -> bool:
        """Whether it says itself how it runs under `torch.vmap`."""
        separate = self._kind.setup_context is not Function.setup_context
        return separate and (self._kind.generate_vmap_rule or self._kind.vmap is not Function.vmap)

    def check(self) -> None:
        """Refuse what computes with parameters that are not among its arguments.

        Raises
        ------
        CannotFuse
            It is activation checkpointing in the reentrant form.
        """
        if issubclass(self._kind, CheckpointFunction):
            raise CannotFuse(
                "reentrant activation checkpointing inside the model: write use_reentrant=False, in transformers "
                'gradient_checkpointing_kwargs={"use_reentrant": False}'
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self._apply(*args, **kwargs)


@contextlib.contextmanager
def functions_as_operators() -> Iterator[None]:
    """Hand applications of an `autograd.Function` to the active mode in this context, as torch does with operators."""
    original = vars(Function)["apply"]

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, kind)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        call = FunctionCall(kind, bound)
        if call.knows_vmap or not has_torch_function(tensors):
            return bound(*args, **kwargs)
        return handle_torch_function(call, tensors, *args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]
