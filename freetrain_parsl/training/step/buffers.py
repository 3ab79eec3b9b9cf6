"""The buffers of a model, and the running statistics among them: each shard of a batch updates these separately.

A member normalizes over its own samples only, as with DistributedDataParallel. The statistics then contain the mean
over the members (or, with a fixed number of shards, over the shards, in their order). Between two averagings they
differ between the members. All other buffers are the same on all members, as the parameters are: a function that
computes one from its share of a batch has to sum it over the members first.

A buffer may be assigned anew at any time (``self.mean = …``), so it is looked up by its name at each use. Buffers that
are not persistent can be computed again from others, and may have another shape on each member: they are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from freetrain_parsl.training.step.gradients import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from freetrain_parsl.training.data.order import Piece
    from freetrain_parsl.training.group.process_group import Group

_STATISTICS = {
    "torch.nn.modules.batchnorm._NormBase": {"running_mean", "running_var", "num_batches_tracked"},
    "torch.ao.quantization.observer.ObserverBase": {"min_val", "max_val", "histogram"},
    "torch.ao.quantization.fake_quantize.FakeQuantizeBase": {"scale", "zero_point"},
}
"""Base class -> buffers that its modules compute from what they see; by name, since some take long to import."""


class BufferPlace(NamedTuple):
    """Where a buffer is found, whichever tensor it currently is.

    Parameters
    ----------
    module
        The module that has it.
    name
        Its name in this module.
    """

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The current tensor; ``None`` if there is none, or if it has no memory yet."""
        tensor = self.module._buffers.get(self.name)  # noqa: SLF001 - the public lookup takes ten times as long
        return None if tensor is None or torch.nn.parameter.is_lazy(tensor) else tensor

    @property
    def is_statistic(self) -> bool:
        """Whether it may differ between members: it is of a kind that is computed from what each of them sees."""
        bases = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(self.module).__mro__)
        return any(self.name in _STATISTICS.get(base, ()) for base in bases)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, BufferPlace]]:
    """Yield the buffers of a model that are part of its state, each once, by their full names."""
    for prefix, module in model.named_modules():
        for name in module._buffers:  # noqa: SLF001 - `named_buffers` leaves out those that are None for now
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - no public API
                yield f"{prefix}.{name}" if prefix else name, BufferPlace(module, name)


class _Saved(NamedTuple):
    """A buffer as it was: the tensor and a copy of its values."""

    place: BufferPlace
    tensor: torch.Tensor | None
    values: torch.Tensor | None

    @classmethod
    def of(cls, place: BufferPlace) -> _Saved:
        tensor = place.tensor
        return cls(place, tensor, None if tensor is None else tensor.detach().clone())

    @property
    def is_mean(self) -> bool:
        return self.tensor is not None and _has_mean(self.tensor)

    def restore(self) -> None:
        if self.tensor is None or self.values is None:
            return
        with torch.no_grad():
            self.tensor.copy_(self.values)
        self.place.module._buffers[self.place.name] = self.tensor  # noqa: SLF001 - without the module's checks


class RunningStatistics:
    """The buffers of a model that change during training.

    Parameters
    ----------
    model
        The network.
    trained
        Its part whose buffers belong to a batch, and not to what user code does once a step.
    by_share
        Whether every shard of a batch starts with the same values, and the mean is computed at every step.
    """

    def __init__(self, model: nn.Module, trained: nn.Module, *, by_share: bool) -> None:
        self._places = [place for _, place in persistent_buffers(model)]
        self._undone = [place for _, place in persistent_buffers(trained)]
        self._by_share = by_share
        # By shards all others are averaged, too: a member may have more shards than another.
        self._averaged = self._places if by_share else [place for place in self._places if place.is_statistic]
        self._begin: list[_Saved] = []
        self._spared: list[_Saved] = []
        self._rows: list[torch.Tensor] = []

    def open_batch(self, group: Group) -> None:
        """Save the values at the start of a batch, if it may be interrupted: a single member is never interrupted."""
        self._rows = []
        may_restore = self._by_share or group.size > 1
        self._begin = [_Saved.of(place) for place in self._undone] if may_restore else []

    def open_piece(self, piece: Piece) -> None:
        """Save the values before a piece that must not change them."""
        if not piece.weight:
            self._spared = [saved for saved in map(_Saved.of, self._averaged) if saved.is_mean]

    def close_piece(self, piece: Piece) -> None:
        """Add the values after a piece; a piece without weight does not change them."""
        if not self._averaged:
            return
        if not piece.weight:
            _restore(self._spared)
        elif self._by_share and piece.last_of_shard:
            self._rows.append(self._flat())
            _restore(saved for saved in self._begin if saved.is_mean)

    def complete(self, group: Group, shards: int) -> None:
        """Average over the shards; raises PeerFailed if a member has failed."""
        if self._by_share and self._tensors():
            mean = fold(group, self._rows, shards, torch.zeros_like(self._flat())) / shards
            self._put_flat(mean)

    @property
    def differ(self) -> bool:
        """Whether members have other values until they are averaged."""
        return not self._by_share and bool(self._tensors())

    def hold(self) -> None:
        """Save the values at which an interrupted batch begins again: forward passes that follow are undone, too."""
        self._begin = list(map(_Saved.of, self._undone))

    def cancel(self) -> None:
        """Restore the values from before an interrupted batch."""
        _restore(self._begin)

    def average(self, group: Group) -> None:
        """Average over the members; raises PeerFailed if one has failed."""
        if not self._by_share and group.size > 1 and self._tensors():
            self._put_flat(group.sum(self._flat()) / group.size)

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors to average."""
        tensors = (place.tensor for place in self._averaged)
        return [tensor for tensor in tensors if tensor is not None and _has_mean(tensor)]

    def _flat(self) -> torch.Tensor:
        return torch.cat([buffer.detach().reshape(-1).cpu().double() for buffer in self._tensors()])

    def _put_flat(self, flat: torch.Tensor) -> None:
        buffers = self._tensors()
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        with torch.no_grad():
            for part, buffer in zip(parts, buffers, strict=True):
                # Batch counts may differ between members, so that their mean is not an integer.
                buffer.copy_((part if buffer.is_floating_point() else part.round()).view_as(buffer))


def _restore(saved: Iterable[_Saved]) -> None:
    for each in saved:
        each.restore()


def _has_mean(buffer: torch.Tensor) -> bool:
    # The second is BatchNorm's num_batches_tracked.
    return buffer.is_floating_point() or (buffer.dtype == torch.int64 and buffer.dim() == 0)
