"""Moves sharded tensors from old to new owners: slices, in rounds of bounded size, over one process group.

An *owner* is a position in a sharding, old or new; a *host* is a rank in the process group. `rounds` has the plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from freetrain_parsl.extensions.sharding.rounds import rounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.extensions.sharding.rounds import ColumnRange, Layout
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.replica_groups import Pending

__all__ = ["BUDGET", "Shards", "Traffic", "move"]

BUDGET = 16 << 20
"""Bytes that a host sends, and that it receives, in one round."""

_MOST_ROUNDS = 4  # in progress, so that a host that is late does not stop the others
_LARGE = 256 << 10  # bytes of a slice that is sent from, and received into, its place


class Shards(Protocol):
    """What the move reads and fills on this host."""

    def read(self, tensor: int, owner: int) -> torch.Tensor:
        """Return the old shard of an owner on this host."""

    def allocate(self, tensor: int, owner: int) -> torch.Tensor:
        """Return a contiguous tensor for the new shard of an owner on this host; called once for each.

        It may be a part of this host's old shard, if that has its content already.
        """


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
        Most bytes of send and receive buffers at a time.
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
        mover.begin(pieces, 2 * budget)
    mover.end()
    return mover.traffic


@dataclass
class _Round:
    """A round in progress.

    Parameters
    ----------
    works
        What it waits for.
    operations
        Keep what is sent.
    landing
        Buffers that are received, and the slices that they hold.
    staging
        Bytes of its buffers.
    """

    works: list[Pending]
    operations: dict[str, list[dist.P2POp]]
    landing: list[tuple[torch.Tensor, list[ColumnRange]]]
    staging: int


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
        self._underway: deque[_Round] = deque()

    def begin(self, pieces: Sequence[ColumnRange], most: int) -> None:
        """Begin a round; others may still be in progress, with at most this many bytes of staging together.

        All hosts begin the rounds in the same order, and wait only for earlier ones: so the oldest one always ends.
        """
        me = self._group.rank
        here: list[ColumnRange] = []
        out: dict[tuple[str, int], list[ColumnRange]] = {}
        into: dict[tuple[str, int], list[ColumnRange]] = {}
        for piece in pieces:
            source, target = self._old_hosts[piece.source], self._new_hosts[piece.target]
            device = self._layouts[piece.tensor].device
            if source == target == me:
                here.append(piece)
            elif source == me:
                out.setdefault((device, target), []).append(piece)
            elif target == me:
                into.setdefault((device, source), []).append(piece)
        staging = sum(
            piece.size for pieces in (*out.values(), *into.values()) for piece in pieces if self._staged(piece)
        )
        while self._underway and (
            len(self._underway) == _MOST_ROUNDS or staging + sum(one.staging for one in self._underway) > most
        ):
            self._finish()
        landing: list[tuple[torch.Tensor, list[ColumnRange]]] = []
        operations: dict[str, list[dist.P2POp]] = {}
        for (device, target), pieces in out.items():
            whole, small = self._divided(pieces)
            tensors = [_bytes_of(self._source(piece)) for piece in whole]
            if small:
                tensors.append(torch.cat([_bytes_of(self._source(piece).contiguous()) for piece in small]))
            operations.setdefault(device, []).extend(dist.P2POp(dist.isend, tensor, target) for tensor in tensors)
        for (device, source), pieces in into.items():
            whole, small = self._divided(pieces)
            tensors = [_bytes_of(self._target(piece)) for piece in whole]
            if small:
                size = sum(piece.size for piece in small)
                tensors.append(torch.empty(size, dtype=torch.uint8, device=self._target(small[0]).device))
                landing.append((tensors[-1], small))
            operations.setdefault(device, []).extend(dist.P2POp(dist.irecv, tensor, source) for tensor in tensors)
        works = [work for device in sorted(operations) for work in self._group.begin_transfers(operations[device])]
        self._underway.append(_Round(works, operations, landing, staging))
        self._copy(here)  # while messages are sent
        traffic = self.traffic
        traffic.sent += sum(piece.size for pieces in out.values() for piece in pieces)
        traffic.received += sum(piece.size for pieces in into.values() for piece in pieces)
        traffic.rounds += 1
        traffic.staging = max(traffic.staging, sum(one.staging for one in self._underway))

    def _copy(self, pieces: Sequence[ColumnRange]) -> None:
        """Copy slices that stay on this host, unless they stay in their place."""
        for piece in pieces:
            target, shard = self._target(piece), self._source(piece)
            if target.data_ptr() != shard.data_ptr():
                target.copy_(shard)

    def end(self) -> None:
        """Wait for all rounds, and allocate the shards that have no elements."""
        while self._underway:
            self._finish()
        for tensor in range(len(self._layouts)):
            for owner, host in enumerate(self._new_hosts):
                if host == self._group.rank and (tensor, owner) not in self._targets:
                    self._shards.allocate(tensor, owner)

    def _finish(self) -> None:
        """Wait for the oldest round."""
        oldest = self._underway.popleft()
        self._group.end_transfers(oldest.works)
        for packed, pieces in oldest.landing:
            self._unpack(packed, pieces)

    def _staged(self, piece: ColumnRange) -> bool:
        """Return whether a slice is sent together with others: it is small, or not in one place in memory."""
        return piece.size < _LARGE or self._layouts[piece.tensor].rows > 1

    def _divided(self, pieces: Sequence[ColumnRange]) -> tuple[list[ColumnRange], list[ColumnRange]]:
        """Return the slices that are sent as they lie in memory, and the others."""
        return (
            [piece for piece in pieces if not self._staged(piece)],
            [piece for piece in pieces if self._staged(piece)],
        )

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

    def _unpack(self, packed: torch.Tensor, pieces: Sequence[ColumnRange]) -> None:
        begin = 0
        for piece in pieces:
            target, raw = self._target(piece), packed[begin : begin + piece.size]
            if begin % target.dtype.itemsize:
                raw = raw.clone()  # dtypes of several sizes are in one message
            target.copy_(raw.view(target.dtype).view(target.shape))
            begin += piece.size


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)
