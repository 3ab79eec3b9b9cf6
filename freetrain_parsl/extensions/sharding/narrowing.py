"""Shards that become smaller in a change stay where they are in memory; what does not belong to them is given back.

A new shard that lies in the old one of the same process is a part of it. Nothing is copied, and no memory is requested
that the system would have to clear first: copying took most of a change in which processes join. Once nothing refers to
the old shard, the pages around the new one are returned to the system.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

__all__ = ["Narrowing"]

_LEAST = 256 << 10  # bytes of an old shard; of smaller ones, too large a part would be in pages with the new one
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Narrowing:
    """The parts of storages in which the shards of one member are."""

    def __init__(self) -> None:
        # Those of which only a part is, or is going to be, used. Not their addresses: another storage gets that of one
        # that is freed, such as a gradient's.
        self._storages: set[StorageWeakRef] = set()
        self._taken: set[StorageWeakRef] = set()  # those of them that a shard of the present change is in

    def begin(self) -> None:
        """Begin a set of new shards."""
        self._taken = set()

    def part_of(self, old: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor | None:
        """Return a part of an old shard as a contiguous tensor; ``None``: it has to be copied.

        Parameters
        ----------
        old
            The old shard.
        offset
            Of the part, in the first dimension.
        shape
            Of the part, which has all of the other dimensions.
        """
        storage = old.untyped_storage()
        if old.device.type != "cpu" or old.nbytes < _LEAST or not old.is_contiguous() or old.is_pinned():
            return None
        which = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's
        is_own = storage.nbytes() == old.nbytes or which in self._storages  # else others may use it, too
        if not is_own or which in self._taken:  # tensors that share memory get their own, as in processes that join
            return None
        self._storages.add(which)
        self._taken.add(which)
        return old.narrow(0, offset, shape[0])

    def settle(self, shards: Iterable[torch.Tensor]) -> None:
        """Give back the memory around these shards, the only ones that are used from now on."""
        used: dict[StorageWeakRef, tuple[torch.UntypedStorage, int, int]] = {}
        for shard in shards:
            storage = shard.untyped_storage()
            which = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's
            if which in self._storages:
                begin, end = shard.data_ptr(), shard.data_ptr() + shard.nbytes
                _, first, last = used.get(which, (storage, begin, end))
                used[which] = storage, min(begin, first), max(end, last)  # several may be in one
        for storage, begin, end in used.values():
            _give_back(storage.data_ptr(), begin)
            _give_back(end, storage.data_ptr() + storage.nbytes())
        self._storages = set(used)


def _give_back(begin: int, end: int) -> None:
    """Return the whole pages of a range of anonymous memory to the system; if it refuses, they stay in use."""
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        _LIBC.madvise(first, size, mmap.MADV_DONTNEED)
