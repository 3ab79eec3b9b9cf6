"""Running statistics of a model (BatchNorm buffers): each shard of a batch updates them separately.

A member normalizes over its own samples only, as with DistributedDataParallel. The buffers then contain the mean over
the members (or, with a fixed number of shards, over the shards, in their order).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from freetrain_parsl.training.step.gradients import fold

if TYPE_CHECKING:
    from torch import nn

    from freetrain_parsl.training.data.order import Piece
    from freetrain_parsl.training.group.process_group import Group


class RunningStatistics:
    """The buffers of a model that change during training.

    Parameters
    ----------
    model
        The network.
    by_share
        Whether every shard of a batch starts with the same values, and the mean is computed at every step.
    """

    def __init__(self, model: nn.Module, *, by_share: bool) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() or _counts(buffer)]
        self._by_share = by_share
        self._begin: list[torch.Tensor] = []
        self._spared: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def open_batch(self, group: Group) -> None:
        """Save the values at the start of a batch, if it may be interrupted: a single member is never interrupted."""
        self._rows = []
        if self._by_share or group.size > 1:
            self._begin = [buffer.detach().clone() for buffer in self._buffers]

    def open_piece(self, piece: Piece) -> None:
        """Save the values before a piece that must not change them."""
        if not piece.weight:
            self._spared = [buffer.detach().clone() for buffer in self._buffers]

    def close_piece(self, piece: Piece) -> None:
        """Add the values after a piece; a piece without weight does not change them."""
        if not self._buffers:
            return
        if not piece.weight:
            self._put(self._spared)
        elif self._by_share and piece.last_of_shard:
            self._rows.append(self._flat())
            self._put(self._begin)

    def complete(self, group: Group, shards: int) -> None:
        """Average over the shards; raises PeerFailed if a member has failed."""
        if self._by_share and self._buffers:
            mean = fold(group, self._rows, shards, torch.zeros_like(self._flat())) / shards
            self._put_flat(mean)

    def cancel(self) -> None:
        """Restore the values from before an interrupted batch."""
        if self._begin:
            self._put(self._begin)

    def average(self, group: Group) -> None:
        """Average over the members; raises PeerFailed if one has failed."""
        if self._buffers and not self._by_share and group.size > 1:
            self._put_flat(group.sum(self._flat()) / group.size)

    def _flat(self) -> torch.Tensor:
        return torch.cat([buffer.detach().reshape(-1).cpu().double() for buffer in self._buffers])

    def _put_flat(self, flat: torch.Tensor) -> None:
        parts = torch.split(flat, [buffer.numel() for buffer in self._buffers])
        # Batch counts may differ between members, so that their mean is not an integer.
        self._put(
            [
                (part if buffer.is_floating_point() else part.round()).view_as(buffer)
                for part, buffer in zip(parts, self._buffers, strict=True)
            ]
        )

    def _put(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)


def _counts(buffer: torch.Tensor) -> bool:
    return buffer.dtype == torch.int64 and buffer.dim() == 0  # BatchNorm's num_batches_tracked
