"""Memory of stacks: the order of a parameter's dimensions in it, and how a process keeps it on CPUs.

The C library of Linux returns large freed blocks to the system at once. The stacks of an array are many times as large
as the tensors of one training job, and the next step asks for the same blocks again: to get them, page by page, took as
long as computing.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.executor.slot.node_share import Lane, fields_of, memory_of_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MemoryLayout",
    "forget_peak",
    "freed_memory_kept",
    "memory_limit",
    "return_freed_memory",
    "used_memory",
]

# Parameters of mallopt, from glibc's malloc.h: when to trim the heap, and how many blocks may be mapped on their own.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER, _DEFAULT_MMAP_MAX = 2**31 - 1, 65536


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory in this process for reuse, and return it at the end; does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    libc.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
        libc.malloc_trim(0)


def return_freed_memory() -> None:
    """Return what is free now to the system, wherever it is; does nothing without glibc.

    For large blocks that will not be needed again: between small ones that stay, they would be cut into pieces that are
    too small for the next ones of their size.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def forget_peak() -> None:
    """Let `used_memory` count from now on: not what ran in this process before, nor what loading took."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.reset_peak_memory_stats()


def used_memory() -> float:
    """Return the bytes that this process uses of the device at most, or, without one, of the host.

    On the host, what an array has freed stays with the process while it runs, and counts.
    """
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    status = fields_of(Path("/proc/self/status"))
    return float(status.get("RssAnon", 0))


def memory_limit() -> float:
    """Return the bytes of the device, or, without one, this slot's share of its node's memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    of_node = memory_of_node()
    return math.inf if of_node is None else of_node[0] / Lane.of_worker().count


class MemoryLayout:
    """Converts between a tensor of some shape and its elements as they are in memory.

    Parameters
    ----------
    tensor
        It has the shape and the layout. If it has gaps or overlaps in memory, elements are in the order of its indices.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        strides = tensor.stride()
        plain = list(range(tensor.dim()))
        order = sorted(plain, key=lambda place: -strides[place])
        self.order = order if tensor.permute(order).is_contiguous() else plain
        """The dimensions from the outermost to the innermost."""
        self.is_plain = self.order == plain
        """Whether that is their own order."""
        self._shape = tensor.shape
        self._in_memory = [tensor.shape[place] for place in self.order]
        self._places = sorted(plain, key=self.order.__getitem__)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the shape, perhaps behind further dimensions, with one dimension in its place."""
        lead = values.shape[: values.dim() - len(self._shape)]
        if not self.is_plain:
            values = values.permute(_behind(len(lead), self.order))
        return values.reshape(*lead, -1)

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the opposite of `flat`, a view."""
        lead = elements.shape[:-1]
        if self.is_plain:
            return elements.view(lead + self._shape)
        return elements.view([*lead, *self._in_memory]).permute(_behind(len(lead), self._places))


def _behind(lead: int, order: Sequence[int]) -> list[int]:
    """Return an order of dimensions behind others that stay."""
    return [*range(lead), *(lead + place for place in order)]
