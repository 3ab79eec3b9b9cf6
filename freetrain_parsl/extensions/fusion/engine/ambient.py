"""What torch and the random generators keep per thread or per process, for functions that take turns in one thread.

Each member of an array draws the random numbers that it would draw alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.training.data import random_streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.training.data.random_streams import HostDraws

__all__ = ["Ambient", "MemberStreams"]

_DEVICES = ("cpu", "cuda")
_NO_AUTOCAST: tuple[tuple[bool, torch.dtype | None], ...] = ((False, None),) * len(_DEVICES)


@dataclass
class Ambient:
    """Grad mode, autocast, default dtype, and the states of the random generators.

    Parameters
    ----------
    grad
        Whether gradients are recorded.
    autocast
        For CPU and CUDA: whether autocast is enabled, and its dtype.
    torch_states
        States of torch's generators: of the CPU, then of the current CUDA device if CUDA is in use; ``None``: those
        that are in place.
    host
        State of the generators of numpy and Python; ``None``: the one that is in place.
    dtype
        Of new tensors.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype | None], ...]
    torch_states: tuple[torch.Tensor, ...] | None
    host: HostDraws | None
    dtype: torch.dtype

    @classmethod
    def at_start(cls) -> Ambient:
        """Return that of a function that has not begun: torch's defaults, and generators that it will seed itself."""
        dtype = torch.get_default_dtype()
        return cls(grad=True, autocast=_NO_AUTOCAST, torch_states=None, host=None, dtype=dtype)

    @classmethod
    def capture(cls) -> Ambient:
        """Return the current one."""
        generators = torch_generators(), random_streams.host_draws()
        return cls(torch.is_grad_enabled(), autocast_state(), *generators, torch.get_default_dtype())

    def restore(self, now: Ambient, host: HostDraws | None = None) -> None:
        """Make it the current one, where the modes are those of `now`.

        Parameters
        ----------
        now
            Has the modes that are in place.
        host
            State of the generators of numpy and Python that is in place; ``None``: not known.
        """
        if not self.has_modes_of(now):
            self.restore_modes()
        if self.autocast is not _NO_AUTOCAST:
            torch.clear_autocast_cache()  # its casts of weights; torch clears it when the outermost context ends
        if self.torch_states is not None:
            restore_torch_generators(self.torch_states)
        if self.host is not None and self.host is not host:  # often the same: training jobs of a sweep share a seed
            random_streams.restore_host_draws(self.host)

    def has_modes_of(self, other: Ambient) -> bool:
        """Return whether all but the generators are the same."""
        return self.grad == other.grad and self.autocast == other.autocast and self.dtype == other.dtype

    def restore_modes(self) -> None:
        """Restore all but the generators."""
        if torch.is_grad_enabled() != self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if autocast_state() != self.autocast:
            for device, (enabled, dtype) in zip(_DEVICES, self.autocast, strict=True):
                torch.set_autocast_enabled(device, enabled)
                if dtype is not None:
                    torch.set_autocast_dtype(device, dtype)


def autocast_state() -> tuple[tuple[bool, torch.dtype | None], ...]:
    """Return, for CPU and CUDA, whether autocast is enabled, and its dtype if it is."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return _NO_AUTOCAST
    return tuple(
        (True, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else (False, None)
        for device in _DEVICES
    )


def torch_generators() -> tuple[torch.Tensor, ...]:
    """Return the states of torch's generators in use."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        states.append(torch.cuda.default_generators[torch.cuda.current_device()].get_state())
    return tuple(states)


def restore_torch_generators(states: tuple[torch.Tensor, ...]) -> None:
    """Set the states of torch's generators."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(states[1])


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

    def __len__(self) -> int:
        return len(self._ambients)

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

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators after an error."""
        before = [ambient.torch_states for ambient in self._ambients]
        try:
            yield
        except BaseException:
            for ambient, states in zip(self._ambients, before, strict=True):
                ambient.torch_states = states
            raise

    def close(self) -> None:
        """Give the members the generators that were advanced for all."""
        if self._shared is not None:
            for ambient in self._ambients:
                ambient.torch_states = self._shared
            self._shared = None
