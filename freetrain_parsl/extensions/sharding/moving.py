"""Moves sharded tensors from old to new owners: slices, in rounds of bounded size, over one process group.

An *owner* is a position in a sharding, old or new; a *host* is a rank in the process group. Every host computes the
same list of slices, which are the overlaps of the old and the new shards, and sends and receives its own of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.training.group.process_group import Group

__all__ = ["BUDGET", "Layout", "Shards", "Traffic", "move", "slices"]

BUDGET = 16 << 20
"""Bytes that a host sends, and that it receives, in one round."""
_PIECES = 8  # of a round: so that rounds are filled evenly


@dataclass(frozen=True)
class Layout:
    """One tensor and the dimension in which it is sharded; the same on all hosts.

    Parameters
    ----------
    shape
        Of the whole tensor.
    dtype
        Of its elements.
    dim
        The sharded dimension; owners have the parts that `torch.chunk` gives, as in FSDP2 and DTensor.
    device
        Type of the device of the shards.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    device: str = "cpu"

    def span(self, owner: int, owners: int) -> tuple[int, int]:
        """Return the first and the last + 1 index of an owner in the sharded dimension."""
        length = self.shape[self.dim]
        chunk = -(-length // owners)
        return min(owner * chunk, length), min((owner + 1) * chunk, length)

    def local_shape(self, owner: int, owners: int) -> tuple[int, ...]:
        """Return the shape of an owner's shard."""
        start, stop = self.span(owner, owners)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """Rows of the tensor as a matrix whose columns are sharded: a shard is a range of columns."""
        return prod(self.shape[: self.dim])

    @property
    def columns_per_index(self) -> int:
        """Columns for each index of the sharded dimension."""
        return prod(self.shape[self.dim + 1 :])

    @property
    def column_bytes(self) -> int:
        """Bytes of one column."""
        return self.rows * self.dtype.itemsize


class ShardSlice(NamedTuple):
    """A range of columns that one old and one new owner share."""

    tensor: int
    source: int
    target: int
    start: int
    stop: int
    size: int
    """Bytes."""


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


def slices(layouts: Sequence[Layout], old: int, new: int, largest: int) -> Iterator[ShardSlice]:
    """Yield the overlaps of the shards of `old` and `new` owners, none of more than `largest` bytes if it can be.

    All slices of a tensor follow each other.
    """
    for number, layout in enumerate(layouts):
        if not layout.column_bytes or not layout.columns_per_index:
            continue
        most = max(1, largest // layout.column_bytes)
        width = layout.columns_per_index
        ends = [layout.span(owner, old)[1] * width for owner in range(old)]
        source = 0
        for target in range(new):
            start, last = (index * width for index in layout.span(target, new))
            while start < last:
                while ends[source] <= start:
                    source += 1
                stop = min(start + most, last, ends[source])
                yield ShardSlice(number, source, target, start, stop, (stop - start) * layout.column_bytes)
                start = stop


@dataclass
class _Round:
    """The slices of one round, and how many bytes each host sends and receives in it."""

    slices: list[ShardSlice] = field(default_factory=list)
    out: dict[int, int] = field(default_factory=dict)
    into: dict[int, int] = field(default_factory=dict)

    def add(self, piece: ShardSlice, source: int, target: int, budget: int) -> bool:
        """Add a slice if it fits, or is the first; return whether it does."""
        # A copy within a host counts as received: that bounds the memory of the new shards of a round.
        out = self.out.get(source, 0) + (piece.size if source != target else 0)
        into = self.into.get(target, 0) + piece.size
        if self.slices and max(out, into) > budget:
            return False
        self.out[source], self.into[target] = out, into
        self.slices.append(piece)
        return True


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
    batch = _Round()
    for piece in slices(layouts, len(old_hosts), len(new_hosts), max(1, budget // _PIECES)):
        source, target = old_hosts[piece.source], new_hosts[piece.target]
        if not batch.add(piece, source, target, budget):
            mover.exchange(batch.slices)
            batch = _Round()
            batch.add(piece, source, target, budget)
    mover.exchange(batch.slices)
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

    def exchange(self, batch: Sequence[ShardSlice]) -> None:
        """Carry out one round."""
        me = self._group.rank
        out: dict[tuple[str, int], list[ShardSlice]] = {}
        into: dict[tuple[str, int], list[ShardSlice]] = {}
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

    def _source(self, piece: ShardSlice) -> torch.Tensor:
        shard = self._shards.read(piece.tensor, piece.source)
        return self._columns(shard, piece, piece.source, len(self._old_hosts))

    def _target(self, piece: ShardSlice) -> torch.Tensor:
        key = piece.tensor, piece.target
        if key not in self._targets:
            self._targets[key] = self._shards.allocate(*key)
        return self._columns(self._targets[key], piece, piece.target, len(self._new_hosts))

    def _columns(self, shard: torch.Tensor, piece: ShardSlice, owner: int, owners: int) -> torch.Tensor:
        layout = self._layouts[piece.tensor]
        first = layout.span(owner, owners)[0] * layout.columns_per_index
        return shard.reshape(layout.rows, -1).narrow(1, piece.start - first, piece.stop - piece.start)

    def _pack(self, pieces: Sequence[ShardSlice]) -> torch.Tensor:
        return torch.cat([self._source(piece).contiguous().view(-1).view(torch.uint8) for piece in pieces])

    def _landing(self, pieces: Sequence[ShardSlice]) -> torch.Tensor:
        device = self._target(pieces[0]).device
        return torch.empty(sum(piece.size for piece in pieces), dtype=torch.uint8, device=device)

    def _unpack(self, packed: torch.Tensor, pieces: Sequence[ShardSlice]) -> None:
        begin = 0
        for piece in pieces:
            target, raw = self._target(piece), packed[begin : begin + piece.size]
            if begin % target.dtype.itemsize:
                raw = raw.clone()  # dtypes of several sizes are in one message
            target.copy_(raw.view(target.dtype).view(target.shape))
            begin += piece.size
