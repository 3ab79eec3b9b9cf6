"""Moves sharded tensors from old to new owners: slices, in rounds of bounded size, over one process group.

An *owner* is a position in a sharding, old or new; a *host* is a rank in the process group. `rounds` has the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from freetrain_parsl.extensions.sharding.rounds import rounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.extensions.sharding.rounds import ColumnRange, Layout
    from freetrain_parsl.training.group.process_group import Group

__all__ = ["BUDGET", "Shards", "Traffic", "move"]

BUDGET = 16 << 20
"""Bytes that a host sends, and that it receives, in one round."""


class Shards(Protocol):
    """What the move reads and fills on this host."""

    def read(self, tensor: int, owner: int) -> torch.Tensor:
        """Return the old shard of an owner on this host."""

    def allocate(self, tensor: int, owner: int) -> torch.Tensor:
        """Return a contiguous tensor for the new shard of an owner on this host; called once for each."""


@dataclass
class Traffic:
    """What a move was for this host.

    Parameters
    ----------
    sent, received
        Bytes.
    rounds
        Number of rounds of the whole group.
    staging
        Bytes of the largest send and receive buffers of a round together.
    """

    sent: int = 0
    received: int = 0
    rounds: int = 0
    staging: int = 0

    def followed_by(self, other: Traffic) -> Traffic:
        """Return what both moves were together, one after the other."""
        staging = max(self.staging, other.staging)
        return Traffic(self.sent + other.sent, self.received + other.received, self.rounds + other.rounds, staging)


def move(
    layouts: Sequence[Layout],
    old_hosts: Sequence[int],
    new_hosts: Sequence[int],
    shards: Shards,
    group: Group,
    *,
    budget: int = BUDGET,
) -> Traffic:
    """Fill the new shards on all hosts from the old ones; every member of the group calls this.

    Parameters
    ----------
    layouts
        The tensors.
    old_hosts, new_hosts
        Owner -> its host. A host may have several owners or none.
    shards
        This host's.
    group
        The hosts.
    budget
        Bytes that a host sends, and that it receives or copies, in one round.

    Raises
    ------
    PeerFailed
        A member has failed.
    """
    mover = _Mover(layouts, old_hosts, new_hosts, shards, group)
    for pieces in rounds_of(layouts, old_hosts, new_hosts, group.rank, budget):
        mover.exchange(pieces)
    mover.fill_up()
    return mover.traffic


class _Mover:
    """The part of one host in a move."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        old_hosts: Sequence[int],
        new_hosts: Sequence[int],
        shards: Shards,
        group: Group,
    ) -> None:
        self.traffic = Traffic()
        self._layouts, self._old_hosts, self._new_hosts = layouts, old_hosts, new_hosts
        self._shards, self._group = shards, group
        self._targets: dict[tuple[int, int], torch.Tensor] = {}

    def exchange(self, batch: Sequence[ColumnRange]) -> None:
        """Carry out one round."""
        me = self._group.rank
        out: dict[tuple[str, int], list[ColumnRange]] = {}
        into: dict[tuple[str, int], list[ColumnRange]] = {}
        for piece in batch:
            source, target = self._old_hosts[piece.source], self._new_hosts[piece.target]
            device = self._layouts[piece.tensor].device
            if source == target == me:
                self._target(piece).copy_(self._source(piece))
            elif source == me:
                out.setdefault((device, target), []).append(piece)
            elif target == me:
                into.setdefault((device, source), []).append(piece)
        packed = {key: self._pack(pieces) for key, pieces in out.items()}
        landing = {key: self._landing(pieces) for key, pieces in into.items()}
        sent, received = (sum(buffer.numel() for buffer in buffers.values()) for buffers in (packed, landing))
        traffic = self.traffic
        traffic.sent, traffic.received = traffic.sent + sent, traffic.received + received
        traffic.rounds, traffic.staging = traffic.rounds + 1, max(traffic.staging, sent + received)
        for device in sorted({device for device, _ in (*packed, *landing)}):
            operations = [dist.P2POp(dist.isend, packed[key], key[1]) for key in packed if key[0] == device]
            operations += [dist.P2POp(dist.irecv, landing[key], key[1]) for key in landing if key[0] == device]
            with self._group.waits():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        for key, pieces in into.items():
            self._unpack(landing[key], pieces)

    def fill_up(self) -> None:
        """Allocate the shards that have no elements."""
        for tensor in range(len(self._layouts)):
            for owner, host in enumerate(self._new_hosts):
                if host == self._group.rank and (tensor, owner) not in self._targets:
                    self._shards.allocate(tensor, owner)

    def _source(self, piece: ColumnRange) -> torch.Tensor:
        shard = self._shards.read(piece.tensor, piece.source)
        return self._columns(shard, piece, piece.source, len(self._old_hosts))

    def _target(self, piece: ColumnRange) -> torch.Tensor:
        key = piece.tensor, piece.target
        if key not in self._targets:
            self._targets[key] = self._shards.allocate(*key)
        return self._columns(self._targets[key], piece, piece.target, len(self._new_hosts))

    def _columns(self, shard: torch.Tensor, piece: ColumnRange, owner: int, owners: int) -> torch.Tensor:
        layout = self._layouts[piece.tensor]
        first = layout.span(owner, owners)[0] * layout.columns_per_index
        return shard.reshape(layout.rows, -1).narrow(1, piece.start - first, piece.stop - piece.start)

    def _pack(self, pieces: Sequence[ColumnRange]) -> torch.Tensor:
        return torch.cat([self._source(piece).contiguous().view(-1).view(torch.uint8) for piece in pieces])

    def _landing(self, pieces: Sequence[ColumnRange]) -> torch.Tensor:
        device = self._target(pieces[0]).device
        return torch.empty(sum(piece.size for piece in pieces), dtype=torch.uint8, device=device)

    def _unpack(self, packed: torch.Tensor, pieces: Sequence[ColumnRange]) -> None:
        begin = 0
        for piece in pieces:
            target, raw = self._target(piece), packed[begin : begin + piece.size]
            if begin % target.dtype.itemsize:
                raw = raw.clone()  # dtypes of several sizes are in one message
            target.copy_(raw.view(target.dtype).view(target.shape))
            begin += piece.size
