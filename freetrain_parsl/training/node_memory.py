"""Memory of a slot that outlives the process of a training job: copies of a sharded state, for the process after it.

It is in files without a name, which the processes of a slot inherit: the kernel frees it with the last of them.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NodeMemory", "Shelf"]

_SHELVES = 4  # this member's copy and another member's; of a complete copy, and of the next one
_HEADER = mmap.PAGESIZE  # four numbers; the content follows, then the head
_WORD = 8
_SEALED, _HEAD, _SIZE, _TRIES = (_WORD * number for number in range(4))


class Shelf:
    """One copy: its content, whose size rarely changes from one copy to the next, and a head that describes it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("freetrain-copy")
        self._mapped: mmap.mmap | None = None
        self._pinned: int | None = None  # address of what is registered with the GPU

    def open(self, size: int) -> torch.Tensor:
        """Return the memory for a content of `size` bytes; until it is sealed, the shelf counts as empty."""
        self._map(_HEADER + size)
        self._set(_SEALED, 0)
        self._set(_SIZE, size)
        return self._content(size)

    def pin(self) -> None:
        """Let GPUs copy to this memory while the program continues; where this is not possible, it waits for them."""
        if self._pinned is None and self._mapped is not None and torch.cuda.is_available():
            self._pinned = torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()
            torch.cuda.cudart().cudaHostRegister(self._pinned, len(self._mapped), 0)  # type: ignore[no-untyped-call]  # torch's

    def _unpin(self) -> None:
        """Forget the registration before the mapping ends: a later mapping may have the same address."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]  # torch's
            self._pinned = None

    def seal(self, head: bytes) -> None:
        """Note that the content is complete, and what it is."""
        size = self._get(_SIZE)
        self._map(_HEADER + size + len(head))
        assert self._mapped is not None, "mapped above"
        self._mapped[_HEADER + size : _HEADER + size + len(head)] = head
        self._set(_HEAD, len(head))
        self._set(_TRIES, 0)
        self._set(_SEALED, 1)

    def read(self) -> tuple[bytes, torch.Tensor] | None:
        """Return the head and the content, which is not copied; ``None``: it is empty."""
        if not self.held:
            return None
        self._map(self.held)
        if not self._get(_SEALED):
            return None
        size, length = self._get(_SIZE), self._get(_HEAD)
        assert self._mapped is not None, "mapped above"
        return self._mapped[_HEADER + size : _HEADER + size + length], self._content(size)

    @property
    def held(self) -> int:
        """Bytes of memory that it has."""
        return os.fstat(self._file).st_size

    @property
    def tries(self) -> int:
        """How often a training job has tried to continue from it."""
        return self._get(_TRIES) if self.held else 0

    def tried(self) -> None:
        """Count one more."""
        self._set(_TRIES, self.tries + 1)

    def empty(self) -> None:
        """Forget the content; its memory stays, as a thread may still write to it."""
        if self.held:
            self._map(self.held)
            self._set(_SEALED, 0)

    def free(self) -> None:
        """Give the memory of an empty shelf back; no tensor of an earlier content may be used any more."""
        if self.held and self.read() is None:
            self._unpin()
            self._mapped = None
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Give everything back."""
        self._unpin()
        self._mapped = None
        os.close(self._file)

    def _map(self, size: int) -> None:
        if size > self.held:
            os.ftruncate(self._file, size)
        if self._mapped is None or len(self._mapped) < size:
            self._unpin()
            self._mapped = mmap.mmap(self._file, self.held)  # tensors in the old mapping keep it

    def _content(self, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=size, offset=_HEADER)

    def _get(self, place: int) -> int:
        assert self._mapped is not None, "mapped before"
        return int.from_bytes(self._mapped[place : place + _WORD], "little")

    def _set(self, place: int, value: int) -> None:
        assert self._mapped is not None, "mapped before"
        self._mapped[place : place + _WORD] = value.to_bytes(_WORD, "little")


class NodeMemory:
    """The copies that a slot keeps.

    Parameters
    ----------
    node, block
        The slot's node, and the batch job that has it: what may be lost at once.
    of_node
        Returns the bytes of host memory that jobs may use on the node, and those still available; ``None``: unknown.
    """

    def __init__(self, node: str, block: str, of_node: Callable[[], tuple[int, int] | None]) -> None:
        self.node, self.block = node, block
        self._of_node = of_node
        self.shelves = tuple(Shelf() for _ in range(_SHELVES))

    @property
    def available(self) -> int:
        """Bytes of host memory that are available on the node; 0 where nothing is known."""
        known = self._of_node()
        return 0 if known is None else known[1]

    @property
    def held(self) -> int:
        """Bytes of memory that the copies have."""
        return sum(shelf.held for shelf in self.shelves)

    def empty(self) -> None:
        """Forget all copies: the training job needs them no more."""
        for shelf in self.shelves:
            shelf.empty()

    def free(self) -> None:
        """Give the memory of empty shelves back, in a process that has not used them or has ended its threads."""
        for shelf in self.shelves:
            shelf.free()

    def close(self) -> None:
        """Give everything back."""
        for shelf in self.shelves:
            shelf.close()
