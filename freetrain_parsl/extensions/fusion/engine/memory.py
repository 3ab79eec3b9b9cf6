"""Memory of stacks on CPUs: kept by the process while an array trains.

The C library of Linux returns large freed blocks to the system at once. The stacks of an array are many times as large
as the tensors of one training, and the next step asks for the same blocks again: to get them, page by page, took as
long as computing.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["freed_memory_kept"]

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
