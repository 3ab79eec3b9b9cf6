"""Numbers of nodes that a training job may have: those that its model allows, and sizes where jobs share nodes.

Where jobs share nodes of A slots, sizes within a node form a chain 1 = d_1 | d_2 | ... | d_m = A, in which each divides
the next; above it there are multiples of A. A job smaller than a node is inside one node, a larger one has whole nodes.

**Counts decide whether jobs fit.** Let node i have f_i free slots, and let W_r be the slots that jobs of at least d_r
slots want. They can all be placed if and only if, for each r::

    W_r <= C_r,      C_r = sum_i d_r floor(f_i / d_r)

It is necessary, as a job of at least d_r slots takes a multiple of d_r on each node. It is sufficient: place the
largest first, on any node that has room. As d_r divides all sizes placed before, a node that has given k d_r slots
still takes floor(f_i / d_r) - k jobs of d_r, so that the room for the next job does not depend on where the others
went. With nodes that are all free, f_i = A, all C_r are equal: any jobs that fit in total can be placed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from freetrain_parsl.errors import InvalidApp

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = ["ANY_COUNT", "AllowedCounts", "are_sizes", "room", "round_down", "round_up", "sizes_within", "wanted"]


@dataclass(frozen=True)
class AllowedCounts:
    """The counts that a job's model allows: the multiples of one number that divide another one.

    Groups of r processes need a multiple of r. A tensor of d rows that is divided evenly needs a divisor of d.
    Conditions of these kinds together, and the same conditions counted in nodes of several processes, are again of this
    form. With replicas, the conditions are on the size of one. The counts are those of fewer replicas of the least
    size, and of all replicas of any equal size: with 2 replicas of at least 3, these are 3, 6, 8, 10 and so on.

    Parameters
    ----------
    multiple_of
        What divides the counts.
    divisor_of
        What they divide; zero, which any count divides, for no such limit.
    replicas
        The number of replicas where there is room for them.
    replica_of
        The least size of one.

    Raises
    ------
    InvalidApp
        No count is allowed.
    """

    multiple_of: int = 1
    divisor_of: int = 0
    replicas: int = 1
    replica_of: int = 1

    def __post_init__(self) -> None:
        if self.multiple_of < 1 or self.divisor_of < 0 or self.divisor_of % self.multiple_of:
            raise InvalidApp(
                f"no number of processes is a multiple of {self.multiple_of} and divides {self.divisor_of}: change the "
                "number of replicas, or the dimension over which a tensor is sharded"
            )

    def __contains__(self, count: int) -> bool:
        replicas = min(self.replicas, count // self.replica_of)
        if replicas < 1 or count % replicas:
            return False
        size = count // replicas
        fits = replicas == self.replicas or size == self.replica_of
        return fits and size % self.multiple_of == 0 and self.divisor_of % size == 0

    @property
    def _of_replicas(self) -> bool:
        return self.replicas > 1 or self.replica_of > 1

    def replicas_in(self, count: int) -> int:
        """Return the number of equal replicas of so many processes; at least 1, also if the count is not allowed."""
        room = min(self.replicas, count // self.replica_of)
        return next((n for n in range(room, 1, -1) if count % n == 0), 1)

    def __and__(self, other: AllowedCounts) -> AllowedCounts:
        """Return the counts that both allow; if one has replicas, the other is on the size of one."""
        return AllowedCounts(
            math.lcm(self.multiple_of, other.multiple_of),
            math.gcd(self.divisor_of, other.divisor_of),
            max(self.replicas, other.replicas),
            max(self.replica_of, other.replica_of),
        )

    def in_units(self, size: int) -> AllowedCounts:
        """Return the numbers of units of so many processes each, such as nodes, of which the processes are allowed."""
        if self.divisor_of % size:
            raise InvalidApp(
                f"no number of nodes is allowed: the number of processes divides {self.divisor_of}, and each node has "
                f"{size}"
            )
        multiple = self.multiple_of // math.gcd(self.multiple_of, size)
        return AllowedCounts(multiple, self.divisor_of // size, self.replicas, -(-self.replica_of // size))

    def mask(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each count, zero or more, whether it is allowed."""
        replicas = np.minimum(self.replicas, counts // self.replica_of)
        some = np.maximum(replicas, 1)
        size = np.maximum(counts // some, 1)
        divided = (replicas > 0) & (counts % some == 0) & ((replicas == self.replicas) | (size == self.replica_of))
        allowed: npt.NDArray[np.bool_] = divided & (size % self.multiple_of == 0) & (self.divisor_of % size == 0)
        return allowed

    def at_most(self, count: int) -> int:
        """Return the largest allowed count that is not larger; zero if there is none."""
        if self._of_replicas:
            return next((n for n in range(count, 0, -1) if n in self), 0)
        times = range(count // self.multiple_of, 0, -1)
        return next((n * self.multiple_of for n in times if n * self.multiple_of in self), 0)

    def at_least(self, count: int) -> int:
        """Return the smallest allowed count that is not smaller; zero if there is none."""
        if self._of_replicas:
            # From the size of all replicas on, a period has an allowed count, unless what it divides ends before.
            period = self.replicas * self.multiple_of
            last = self.replicas * self.divisor_of or max(count, self.replicas * self.replica_of) + period
            return next((n for n in range(max(count, 1), last + 1) if n in self), 0)
        first = max(-(-count // self.multiple_of), 1)
        if not self.divisor_of:
            return first * self.multiple_of
        times = range(first, self.divisor_of // self.multiple_of + 1)
        return next((n * self.multiple_of for n in times if n * self.multiple_of in self), 0)

    def __str__(self) -> str:
        multiple = f"multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        divisor = f"divisors of {self.divisor_of}" if self.divisor_of else ""
        which = " that are ".join(filter(None, (multiple, divisor))) or "all"
        if not self._of_replicas:
            return which
        sizes = "" if which == "all" else f" in sizes that are {which}"
        return f"up to {self.replicas} equal replicas of at least {self.replica_of}{sizes}"


ANY_COUNT: Final = AllowedCounts()
"""No restriction."""


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
