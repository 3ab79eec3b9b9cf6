"""Plans a move of sharded tensors: which columns go from which old to which new owner, and in which round.

All hosts plan the same rounds, of which each computes only its own slices. In a round, no host sends or receives more
than a budget, and if tensors are large, all hosts send and receive at the same time: the overlaps of old and new shards
of such a tensor are divided into as many equal parts as it needs rounds, and each round moves a part of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

__all__ = ["ColumnRange", "Layout", "rounds_of"]


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


class ColumnRange(NamedTuple):
    """A range of columns that one old and one new owner share."""

    tensor: int
    source: int
    target: int
    start: int
    stop: int
    size: int
    """Bytes."""


class _Overlaps:
    """The overlaps of the old and the new shards of tensors with the same number of columns, widths and bytes."""

    def __init__(self, layout: Layout, old_hosts: NDArray[np.intp], new_hosts: NDArray[np.intp], host: int) -> None:
        length, width = layout.shape[layout.dim], layout.columns_per_index
        old, new = -(-length // len(old_hosts)), -(-length // len(new_hosts))
        edges = np.union1d(np.arange(0, length, old), np.arange(0, length, new)).astype(np.int64)
        source, target = edges // old, edges // new
        stop = np.append(edges[1:], length) * width
        start = edges * width
        sends, receives = old_hosts[source], new_hosts[target]
        size = (stop - start) * layout.column_bytes
        hosts = int(max(old_hosts.max(), new_hosts.max())) + 1
        # A copy within a host counts as received: that bounds the memory of the new shards of a round.
        out = np.bincount(sends, size * (sends != receives), hosts)
        self.load = np.concatenate([out, np.bincount(receives, size, hosts)])
        """Bytes that each host sends, then bytes that each host receives."""
        self.most = int(max(stop - start))
        """Columns of the longest."""
        mine = (sends == host) | (receives == host)
        self._mine = [tuple(map(int, row)) for row in np.stack([source, target, start, stop], 1)[mine]]
        self._bytes = layout.column_bytes

    def slices(self, tensor: int, part: int = 0, parts: int = 1) -> Iterator[ColumnRange]:
        """Yield this host's part of those of a tensor."""
        for source, target, begin, end in self._mine:
            start = begin + (end - begin) * part // parts
            stop = begin + (end - begin) * (part + 1) // parts
            if start < stop:
                yield ColumnRange(tensor, source, target, start, stop, (stop - start) * self._bytes)


def rounds_of(
    layouts: Sequence[Layout], old_hosts: Sequence[int], new_hosts: Sequence[int], host: int, budget: int
) -> Iterator[list[ColumnRange]]:
    """Yield the slices that a host sends, receives or copies in each round; the rounds are the same on all hosts.

    Parameters
    ----------
    layouts
        The tensors. Their slices are in this order.
    old_hosts, new_hosts
        Owner -> its host. A host may have several owners or none.
    host
        The host.
    budget
        Bytes that a host sends, and that it receives or copies, in one round, up to a column of each slice.
    """
    owners = np.asarray(old_hosts, dtype=np.intp), np.asarray(new_hosts, dtype=np.intp)
    known: dict[tuple[int, int, int], _Overlaps] = {}
    gathered: list[ColumnRange] = []
    load: NDArray[np.float64] | None = None  # of the round being gathered
    for number, layout in enumerate(layouts):
        key = layout.shape[layout.dim], layout.columns_per_index, layout.column_bytes
        if not all(key):
            continue
        if key not in known:
            known[key] = _Overlaps(layout, *owners, host)
        overlaps = known[key]
        if load is not None:
            load = load + overlaps.load
            if load.max() <= budget:
                gathered.extend(overlaps.slices(number))
                continue
            yield gathered
            gathered, load = [], None
        parts = min(int(-(-overlaps.load.max() // budget)), overlaps.most)
        for part in range(parts - 1):
            yield list(overlaps.slices(number, part, parts))
        gathered = list(overlaps.slices(number, parts - 1, parts))
        load = overlaps.load / parts
    if load is not None:
        yield gathered
