"""The random numbers of the members of an array: each member draws what it would draw alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.extensions.fusion.engine.ambient import restore_torch_generators, torch_generators

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.extensions.fusion.engine.ambient import Ambient

__all__ = ["MemberStreams"]


class MemberStreams:
    """torch's generators of all members.

    Parameters
    ----------
    ambients
        Of each member; their generators are advanced by what is drawn here.
    """

    def __init__(self, ambients: Sequence[Ambient]) -> None:
        self._ambients = ambients
        self._agree: bool | None = None
        self._shared: tuple[torch.Tensor, ...] | None = None  # state of all, if they agree and something was drawn

    @property
    def agree(self) -> bool:
        """Whether all generators are in the same state, so that one draw is that of every member."""
        if self._agree is None:
            first, *others = [ambient.torch_states or () for ambient in self._ambients]
            self._agree = all(len(other) == len(first) and all(map(torch.equal, first, other)) for other in others)
        return self._agree

    @contextmanager
    def of(self, member: int) -> Iterator[None]:
        """Make torch's generators those of a member; what is drawn advances them."""
        self.close()
        self._agree = None
        states = self._ambients[member].torch_states
        if states is not None:
            restore_torch_generators(states)
        try:
            yield
        finally:
            self._ambients[member].torch_states = torch_generators()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make torch's generators those of all members, which agree; what is drawn advances all of them."""
        assert self.agree, "checked by the caller"
        states = self._shared or self._ambients[0].torch_states
        if states is not None:
            restore_torch_generators(states)
        try:
            yield
        finally:
            self._shared = torch_generators()

    def close(self) -> None:
        """Give the members the generators that were advanced for all."""
        if self._shared is not None:
            for ambient in self._ambients:
                ambient.torch_states = self._shared
            self._shared = None
