"""Running statistics of a model (BatchNorm's buffers): each share of a batch updates them on its own.

A member's normalisation sees its own samples only, as with DistributedDataParallel. What the buffers then hold is the
mean over the members (or, with a fixed number of shares, over the shares, in their order).
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
    """The buffers of a model that change while it trains.

    Parameters
    ----------
    model
        The network.
    by_share
        Whether every share of a batch begins with the same values, and the mean is taken at every step.
    """

    def __init__(self, model: nn.Module, *, by_share: bool) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() or _counts(buffer)]
        self._by_share = by_share
        self._begin: list[torch.Tensor] = []
        self._spared: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def open_batch(self, group: Group) -> None:
        """Remember the values at the beginning of a batch, if they may be needed: nobody cuts a member off alone."""
        self._rows = []
        if self._by_share or group.size > 1:
            self._begin = [buffer.detach().clone() for buffer in self._buffers]

    def open_piece(self, piece: Piece) -> None:
        """Remember the values before a piece that is to leave them alone."""
        if not piece.weight:
            self._spared = [buffer.detach().clone() for buffer in self._buffers]

    def close_piece(self, piece: Piece) -> None:
        """Note what a piece has made of them; one without weight leaves them alone."""
        if not self._buffers:
            return
        if not piece.weight:
            self._put(self._spared)
        elif self._by_share and piece.last_of_shard:
            self._rows.append(self._flat())
            self._put(self._begin)

    def complete(self, group: Group, shards: int) -> None:
        """Take the mean over the shares; PeerFailed if a member is gone."""
        if self._by_share and self._buffers:
            mean = fold(group, self._rows, shards, torch.zeros_like(self._flat())) / shards
            self._put_flat(mean)

    def cancel(self) -> None:
        """Undo what a batch that is cut off has made of them."""
        if self._begin:
            self._put(self._begin)

    def average(self, group: Group) -> None:
        """Take the mean over the members; PeerFailed if one is gone."""
        if self._buffers and not self._by_share and group.size > 1:
            self._put_flat(group.sum(self._flat()) / group.size)

    def _flat(self) -> torch.Tensor:
        return torch.cat([buffer.detach().reshape(-1).cpu().double() for buffer in self._buffers])

    def _put_flat(self, flat: torch.Tensor) -> None:
        parts = torch.split(flat, [buffer.numel() for buffer in self._buffers])
        # Counts of batches may differ between members by a fraction in the mean.
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
