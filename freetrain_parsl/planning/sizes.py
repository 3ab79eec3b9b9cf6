"""Numbers of slots that a training job may have where jobs share nodes: divisors of a node, then whole nodes.

On nodes of A slots the sizes within a node form a chain 1 = d_1 | d_2 | ... | d_m = A, in which each divides the next;
above it there are multiples of A. A job smaller than a node is inside one node, a larger one has whole nodes.

**Counts decide whether jobs fit.** Let node i have f_i free slots, and let W_r be the slots that jobs of at least d_r
slots want. They can all be placed if and only if, for each r::

    W_r <= C_r,      C_r = sum_i d_r floor(f_i / d_r)

It is necessary, as a job of at least d_r slots takes a multiple of d_r on each node. It is sufficient: place the
largest first, on any node that has room. As d_r divides all sizes placed before, a node that has given k d_r slots
still takes floor(f_i / d_r) - k jobs of d_r, so that the room for the next job does not depend on where the others
went. With nodes that are all free, f_i = A, all C_r are equal: any jobs that fit in total can be placed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = ["are_sizes", "room", "round_down", "round_up", "sizes_within", "wanted"]


def sizes_within(slots: int) -> tuple[int, ...]:
    """Return the sizes of jobs up to a node of this many slots: 1, 2, 4 for 4; 1, 2, 6 for 6; 1, 2, 4, 12 for 12."""
    sizes, rest = [1], slots
    while rest > 1:
        prime = next(divisor for divisor in range(2, rest + 1) if rest % divisor == 0)
        sizes.append(sizes[-1] * prime)
        rest //= prime
    return tuple(sizes)


def are_sizes(counts: npt.NDArray[np.int64], slots: int) -> npt.NDArray[np.bool_]:
    """Return for each count whether a job may have it on nodes of this many slots; 0 is one."""
    sizes: npt.NDArray[np.bool_] = np.isin(counts, sizes_within(slots)) | (counts % slots == 0)
    return sizes


def round_down(count: int, slots: int) -> int:
    """Return the largest size of at most `count` slots; 0 if there is none."""
    if count >= slots:
        return count - count % slots
    return max((size for size in sizes_within(slots) if size <= count), default=0)


def room(free: Iterable[int], slots: int) -> npt.NDArray[np.int64]:
    """Return C_r for each size within a node, shape (m,), of nodes with these numbers of free slots."""
    sizes = np.array(sizes_within(slots), dtype=np.int64)
    numbers = np.fromiter(free, dtype=np.int64)
    counts: npt.NDArray[np.int64] = (numbers[:, None] // sizes * sizes).sum(axis=0)
    return counts


def wanted(counts: npt.NDArray[np.int64], slots: int) -> npt.NDArray[np.int64]:
    """Return W_r for each size within a node, shape (m,), of jobs of these sizes."""
    sizes = np.array(sizes_within(slots), dtype=np.int64)
    slots_wanted: npt.NDArray[np.int64] = np.where(counts[:, None] >= sizes, counts[:, None], 0).sum(axis=0)
    return slots_wanted


def round_up(count: int, slots: int) -> int:
    """Return the smallest size of at least `count` slots."""
    if count > slots:
        return -(-count // slots) * slots
    return next(size for size in sizes_within(slots) if size >= count)
