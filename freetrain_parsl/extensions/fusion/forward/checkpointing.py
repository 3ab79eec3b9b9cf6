"""Activation checkpointing inside fused calls: what is recomputed in the backward pass is computed on stacks again.

The recomputation runs when the fused forward pass is over: the level, the mode, the stacked parameters and the members'
random numbers of that pass are gone. They are put in place for it.

`torch.utils.checkpoint` makes the recomputation in a private generator, which only this module uses. In a torch without
it, or with another one, the mode of the fused operators refuses checkpointing by the hooks on saved tensors.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.ambient import restore_torch_generators, torch_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from freetrain_parsl.extensions.fusion.engine.per_member import RandomStreams
    from freetrain_parsl.extensions.fusion.forward.operators import FusedOperators

__all__ = ["fused_checkpointing"]

_NAME = "_checkpoint_without_reentrant_generator"
_generator: Any = getattr(torch_checkpoint, _NAME, None)
_PARAMETERS = ["fn", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop", "args", "kwargs"]
_is_known = _generator is not None and list(inspect.signature(_generator).parameters) == _PARAMETERS


class ReplayedStreams:
    """Random streams that begin where those of the members are now, and do not advance them."""

    def __init__(self, states: list[tuple[torch.Tensor, ...]]) -> None:
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    @classmethod
    def beginning_at(cls, streams: RandomStreams) -> ReplayedStreams:
        """Return streams that begin where others are."""
        states = []
        for member in range(len(streams)):
            with streams.of(member):
                states.append(torch_generators())
        return cls(states)

    def again(self) -> ReplayedStreams:
        """Return streams that begin at the same place: a backward pass may be made twice."""
        return ReplayedStreams(list(self._states))

    @property
    def agree(self) -> bool:
        """See `RandomStreams`."""
        first = self._states[0]
        return all(all(map(torch.equal, state, first)) for state in self._states[1:])

    @contextlib.contextmanager
    def of(self, member: int) -> Iterator[None]:
        """See `RandomStreams`."""
        before = torch_generators()
        restore_torch_generators(self._states[member])
        try:
            yield
        finally:
            self._states[member] = torch_generators()
            restore_torch_generators(before)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """See `RandomStreams`."""
        with self.of(0):
            yield
        self._states = [self._states[0]] * len(self._states)


@contextlib.contextmanager
def fused_checkpointing(
    fused: FusedOperators, again: Callable[[RandomStreams, Callable[[], Any]], None]
) -> Iterator[None]:
    """Let activation checkpointing compute again as it has computed, in this context.

    Parameters
    ----------
    fused
        The mode of the forward pass.
    again
        Called with random streams and a function: calls it in a new level, with the stacked parameters in the model.
    """
    if not _is_known:
        yield
        return

    def generator(
        function: Callable[..., Any],
        _preserve: Any,
        context: Any,
        determinism: str,
        debug: Any,
        early_stop: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        if context is not torch_checkpoint.noop_context_fn or debug:
            raise CannotFuse("activation checkpointing with context_fn or debug inside the model")
        begin = ReplayedStreams.beginning_at(fused.streams)

        def recompute() -> None:
            again(begin.again(), lambda: function(*args, **kwargs))

        # Without arguments: `recompute` has them, stacked. Without torch's random numbers: it has the members'.
        part = _generator(recompute, False, context, determinism, False, early_stop)  # noqa: FBT003
        next(part)
        with fused.hooks_on_saved_tensors():
            yield
        next(part, None)

    setattr(torch_checkpoint, _NAME, generator)
    try:
        yield
    finally:
        setattr(torch_checkpoint, _NAME, _generator)
